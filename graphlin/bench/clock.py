"""Times work on a device: as graph replays, as eager calls, and as what the host spends on them."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from graphlin.backends import get_backend
from graphlin.bench.results import Sample

Work = Callable[[], Any]
WARMUPS = 3
BATCH_MICROSECONDS, LARGEST_BATCH = 400.0, 10


class Clock:
    """Interleaved, repeated timings of work on one device.

    `rounds` is how often each piece of work is timed. On a CPU every time is wall time.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.backend = get_backend(device)

    def captured(self, work: Work) -> Work:
        """Warms the work up, captures it and returns the replay of its graph."""
        stream = self.backend.side_stream(self.device)
        self.backend.synchronize(self.device)  # the work's tensors may be in the making, on another stream
        with self.backend.stream(stream):
            for _ in range(WARMUPS if self.on_device else 1):
                work()
        self.backend.synchronize(self.device)
        with self.backend.capture(pool=self.backend.new_pool(), stream=stream) as graph:
            work()
        self.backend.synchronize(self.device)
        graph.replay()
        self.backend.synchronize(self.device)
        return graph.replay

    def on_stream(self, works: Mapping[str, Work]) -> dict[str, Sample]:
        """Microseconds that each takes on the device's stream; all are timed in turn in every round.

        Short work is repeated between the two events, behind one call that is not timed, so that the stream is never idle
        while the host enqueues it.
        """
        batches = {name: self._batch(work) for name, work in works.items()}
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(self.rounds):
            for name, work in works.items():
                times[name].append(self._elapsed(work, batches[name]))
        return {name: Sample.of(found) for name, found in times.items()}

    def on_host(self, works: Mapping[str, Work]) -> dict[str, Sample]:
        """Microseconds until each call returns, the device being idle before it; all in turn in every round."""
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(self.rounds):
            for name, work in works.items():
                times[name].append(self._wall(work, wait=False))
        return {name: Sample.of(found) for name, found in times.items()}

    def until_done(self, works: Mapping[str, Work]) -> dict[str, Sample]:
        """Microseconds from the call until the device has done its work; all in turn in every round."""
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(self.rounds):
            for name, work in works.items():
                times[name].append(self._wall(work, wait=True))
        return {name: Sample.of(found) for name, found in times.items()}

    @property
    def on_device(self) -> bool:
        """Whether there is a device that works beside the host."""
        return self.device.type != "cpu"

    def _batch(self, work: Work) -> int:
        if not self.on_device:
            return 1
        return max(1, min(LARGEST_BATCH, round(BATCH_MICROSECONDS / self._elapsed(work, 1))))

    def _elapsed(self, work: Work, times: int) -> float:
        if not self.on_device:
            return self._wall(work, wait=True)
        events = torch.get_device_module(self.device)
        begin, end = (events.Event(enable_timing=True) for _ in range(2))
        work()
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / times

    def _wall(self, work: Work, wait: bool) -> float:
        self.backend.synchronize(self.device)
        start = perf_counter()
        work()
        if wait:
            self.backend.synchronize(self.device)
        return (perf_counter() - start) * 1e6
