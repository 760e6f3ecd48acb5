"""Loss curves and step times of the demo as a picture."""

from pathlib import Path

from graphlin.demo.report import Result


def draw(result: Result, path: Path) -> None:
    """Writes the picture in the format that the file's name ends in; raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss_axes, time_axes = figure.subplots(1, 2)
    steps = range(1, len(result.losses.eager) + 1)
    loss_axes.plot(steps, result.losses.eager, linewidth=4, alpha=0.4, label="eager")
    loss_axes.plot(steps, result.losses.captured, linewidth=1.2, color="black", label="captured")
    loss_axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Loss")
    loss_axes.legend()

    times = ([1e3 * s for s in result.seconds.eager], [1e3 * s for s in result.seconds.captured])
    time_axes.plot(steps, times[0], marker="o", label="eager")
    time_axes.plot(steps, times[1], marker="o", label="captured")
    over = [i for i, packing in enumerate(result.packings) if packing.over_tier]
    time_axes.plot([i + 1 for i in over], [times[1][i] for i in over], "kx", markersize=10, label="over the tier: eager")
    time_axes.set(xlabel=f"step ({result.clock})", ylabel="milliseconds", yscale="log", title="Time of a step")
    for axes in (loss_axes, time_axes):
        axes.xaxis.get_major_locator().set_params(integer=True)
    time_axes.legend()
    figure.savefig(path, dpi=150)
