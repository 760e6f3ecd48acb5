import pytest

from graphlin.__main__ import main
from graphlin.bench import arguments, command
from graphlin.bench.results import OURS, REPLAY, load
from graphlin.bench.setting import Job
from tests.bench.conftest import TINY
from tests.bench.rows import example, row


@pytest.fixture(autouse=True)
def tiny(monkeypatch, device):
    monkeypatch.setattr(command, "best_device", lambda: device)
    monkeypatch.setattr(arguments, "scale_of", lambda device: TINY)
    monkeypatch.setattr(command, "compilations", lambda *_: [])


def test_the_command_measures_saves_draws_and_writes(tmp_path, capsys, device, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fla", None)
    files = {name: tmp_path / f"found.{end}" for name, end in (("json", "json"), ("plot", "png"), ("page", "md"))}
    outputs = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert main(["bench", "--only", "conv", "--peers", "fla", "--quick", "--shapes", "20,2", "--commit", "c0ffee",
                 "--sizes", "D=24,W=3", *outputs]) == 0
    out, err = capsys.readouterr()
    run = load(files["json"])
    assert (run.environment.sizes["D"], run.environment.sizes["W"], run.environment.sizes["dtype"]) == (24, 3, "float32")
    assert run.environment.commit == "c0ffee" and run.environment.versions["torch"]
    assert ("no measure of an accelerator" in run.environment.clock) == (device.type == "cpu")
    ours = [r for r in run.rows if r.who == OURS]
    assert {(r.key.direction, r.measure) for r in ours} == {(d, m) for d in ("forward", "forward+backward")
                                                           for m in (REPLAY, "eager, host")}
    assert all(r.sample.low <= r.sample.median <= r.sample.high for r in ours)
    failed = [r for r in run.rows if r.who == "fla"]
    assert len(failed) == 2 and all("ModuleNotFoundError" in r.error for r in failed)
    assert "conv, forward: graph replay, microseconds" in out and "fla failed" in out
    assert "1/1" in err
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert "found.png" in files["page"].read_text() and "| 20, 2 |" in files["page"].read_text()


def test_saved_results_are_shown_and_written_again(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    example().save(first)
    example().save(second)
    page = tmp_path / "page.md"
    assert main(["bench", "--from", str(first), str(second), "--page", str(page), "--plot", str(tmp_path / "p.png")]) == 0
    assert capsys.readouterr().out.count("commit abc123") == 2
    assert page.read_text().count("### stages of gdn") == 2


def failing(setting):
    def measure():
        yield row("conv", (20, 2), 7.0)
        raise RuntimeError("out of\nmemory")

    return [Job("a job", measure), Job("another", lambda: [row("conv", (30, 2), 8.0)])]


def test_a_job_that_fails_is_a_row_and_the_next_one_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(command.SECTIONS, "conv", failing)
    path = tmp_path / "found.json"
    assert main(["bench", "--only", "conv", "--json", str(path)]) == 1
    assert [(r.error, r.sample and r.sample.median) for r in load(path).rows] == [
        (None, 7.0), ("RuntimeError: out of memory", None), (None, 8.0)]
    assert "a job" in capsys.readouterr().out


def test_results_are_saved_while_the_run_goes_on(monkeypatch, tmp_path):
    path = tmp_path / "found.json"
    seen = []
    jobs = [Job("first", lambda: [row("conv", (20, 2), 7.0)]), Job("second", lambda: seen.append(len(load(path).rows)) or [])]
    monkeypatch.setitem(command.SECTIONS, "conv", lambda setting: jobs)
    assert main(["bench", "--only", "conv", "--json", str(path)]) == 0
    assert seen == [1]


@pytest.mark.parametrize(("given", "message"), [
    (["--only", "gdn,mamba"], f"--only: expected some of {', '.join(command.SECTIONS)}, found mamba"),
    (["--only", ""], "found nothing"),
    (["--peers", "flash"], "--peers: expected some of fla, flash_qla, found flash"),
    (["--json", "nowhere/a.json"], "--json: expected a file in a directory that exists, found nowhere/a.json"),
    (["--page", "a.html"], "--page: expected a name that ends in .md"),
    (["--plot", "a.jpeg"], "--plot: expected a name that ends in .png"),
    (["--plot", "a.png", "--only", "layers"], "expected one of gdn, kda, conv among --only"),
    (["--from", "nowhere.json"], "nowhere.json: expected a file that graphlin bench --json wrote"),
    (["--from", "a.json", "--json", "b.json"], "found --from, which measures nothing"),
])
def test_wrong_arguments_are_one_line_and_status_2(capsys, given, message):
    assert main(["bench", *given]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(("option", "value", "message"), [
    *(("--shapes", shape, "such as 4096,32") for shape in ("512", "1x2", "x", "axb", "0x0", "8x-1")),
    *(("--sizes", sizes, "names of H, HV, K, D, W, hidden") for sizes in ("H", "H=0", "H=x", "dtype=3", "X=1")),
])
def test_problems_are_numbers(capsys, option, value, message):
    with pytest.raises(SystemExit) as stop:
        main(["bench", option, value])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_shapes_have_two_spellings():
    assert arguments.shape("4096,32") == arguments.shape("4096x32") == (4096, 32)


def test_files_without_ops_are_no_picture(tmp_path, capsys):
    path, run = tmp_path / "a.json", example()
    run.rows = run.section("layers")
    run.save(path)
    assert main(["bench", "--from", str(path), "--plot", str(tmp_path / "a.png")]) == 2
    assert "found none of gdn, kda, conv in the files" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    assert main(["bench", "--plot", "a.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_no_device_is_one_line_and_status_2(monkeypatch, capsys):
    from graphlin.errors import BackendUnavailable

    def none():
        raise BackendUnavailable("no device here")

    monkeypatch.setattr(command, "best_device", none)
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == "graphlin bench: no device here\n"
