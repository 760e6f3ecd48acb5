"""The bench of context parallelism: its command line, and what one rank of it times."""

import pytest
import torch
import torch.distributed as dist

from graphlin.__main__ import main
from graphlin.bench import parallel
from graphlin.bench.report import grids
from graphlin.bench.results import BOTH, ONE_RANK, OURS, Key, Row, Run, Sample
from graphlin.bench.setting import HOST, Setting
from graphlin.parallel import context_parallel
from tests.bench.rows import ENVIRONMENT


def test_nothing_is_measured_unless_ranks_are_asked_for(device):
    assert parallel.jobs(Setting(device, HOST)) == []
    job, = parallel.jobs(Setting(device, HOST, ranks=2))
    assert job.label == "2 ranks"


def test_more_ranks_than_devices_are_refused(capsys):
    assert main(["bench", "--cp", "5000"]) == 2
    assert "--cp: expected between 1 and the" in capsys.readouterr().err


def test_one_rank_times_each_round(request, tmp_path):
    if request.config.option.device != "host":
        pytest.skip("one process of gloo, whose kernels run on the CPU")
    device = torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        cu, offsets = torch.tensor([0, 20]), torch.tensor([0, 20])
        work = parallel._work("gdn", 20, HOST.sizes, device, {}, lambda: context_parallel(None, cu, offsets))
        times = parallel._times(work, device, 2)
        assert len(times) == 2 and min(times) > 0
        assert parallel._times(None, device, 2) == [0.0, 0.0]
    finally:
        dist.destroy_process_group()


def test_table_has_the_ratio_to_one_rank():
    key = Key("parallel", "gdn", 131072, 1, BOTH)
    rows = [Row(key, OURS, ONE_RANK, Sample.of([200.0])), Row(key, OURS, "2 ranks", Sample.of([120.0]))]
    grid, = grids(Run(ENVIRONMENT, rows))
    assert grid.headers == ["T, N", "graphlin one rank", "graphlin 2 ranks", "ratio"]
    assert grid.lines == [["131072, 1 gdn", "200.0", "120.0", "0.60"]]
