"""Paper trading: equal to the env, exact after every kill, and one line for each mistake."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, TESTS, Capture, error_line, only_run, small, wait_until
from market_rows import write_table

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.load import export_run
from ml_pipeline.assembly.run import train
from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.device import torch_threads
from ml_pipeline.locks import FileLock
from ml_pipeline.worlds.trading.data.bars import Bars, text_of
from ml_pipeline.worlds.trading.data.load import load_market
from ml_pipeline.worlds.trading.data.synthetic import synthetic_bars
from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.paper import PaperPolicy, PaperWalk
from ml_pipeline.worlds.trading.paper_log import LOG_FILE, PaperError, PaperLog

pytestmark = pytest.mark.xdist_group("paper")  # a policy is trained and exported once

N_BARS = 300

# Name -> further overrides of the run. The symbols of the market have different gaps.
CASES = {
    "each": ["network=lstm", "network.size=8", "env.kwargs.symbol=each", "agent.n_minibatches=1"],
    "one": ["env.kwargs.symbol=SYN1", "env.kwargs.window=3", "env.kwargs.account.leverage=2"],
    "portfolio": ["env.kwargs.portfolio=true", "env.kwargs.positions=null"],
    "stopped": ["env.kwargs.account.max_drawdown=0.02"],
}


class Trained(NamedTuple):
    """A policy, its market files, and the arguments of its env."""

    policy: Path
    prices: Path  # a folder
    kwargs: dict[str, Any]


def market_bars() -> dict[str, Bars]:
    return synthetic_bars(
        "gaps", n_symbols=2, n_bars=N_BARS, bar="1h", seed=3, parameters={"outage_share": 0.1}
    )


def trained(name: str) -> Trained:
    """Train in the current folder."""
    prices = Path("prices")
    prices.mkdir()
    for symbol, bars in market_bars().items():
        write_table(prices / f"{symbol}.csv", bars)
    data = {"path": str(prices), "label": "end", "cache_dir": "cache", "validation": 0.25}
    features = "[column_signal,return_1,ema_5,volatility_6,time_of_day]"
    train(
        [
            *small(),
            *("env=trading", "data=files", "env.kwargs.episode_bars=20", "env_seeds=adjacent"),
            *(f"env.kwargs.data.{key}={value}" for key, value in data.items()),
            *(f"env.kwargs.data.features={features}", "~callbacks.evaluation"),
            *CASES[name],
        ]
    )
    _, path, policy, _ = export_run(only_run(Path.cwd()), None, file_format="pt2")
    return Trained(path, prices, policy.metadata["env"]["kwargs"])


Folders = dict[str, tuple[Path, Trained]]


@pytest.fixture(scope="module")
def folders() -> Folders:
    return {}


@pytest.fixture
def case(
    request: pytest.FixtureRequest,
    folders: Folders,
    tmp_path_factory: pytest.TempPathFactory,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Trained:
    """A trained policy by its name, in a copy of its folder."""
    name = getattr(request, "param", "each")
    if name not in folders:
        folder = tmp_path_factory.mktemp(name)
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            folders[name] = folder, trained(name)
    folder, found = folders[name]
    shutil.copytree(folder, here, dirs_exist_ok=True)
    return found


def command(case: Trained, *arguments: str, start: str = "2020-01-01") -> list[str]:
    """Walk the bars after ``start`` into the folder log."""
    known = ["--data", "prices", "--log", "log", "--start", start]
    return ["paper", str(case.policy), *known, *arguments]


def lines(folder: str) -> list[dict[str, Any]]:
    text = (Path(folder) / LOG_FILE).read_text()
    return [json.loads(line) for line in text.splitlines()][1:]


def start_of_test(case: Trained) -> str:
    """A time just before the row at which an episode of the test period starts."""
    market = load_market(period="test", **case.kwargs["data"])
    first = case.kwargs["window"] - 1
    return text_of(int(market.time[first]) - 1_000_000_000)


def backtest(case: Trained, symbol: str) -> list[tuple[float, list[float], list[float], bool]]:
    """Equity, fills and forced fills of each step of the env over the test period."""
    policy = ExportedPolicy.load(case.policy)
    kwargs = {**case.kwargs, "period": "test", "random_start": False}
    if not kwargs["portfolio"]:
        kwargs["symbol"] = symbol
    env = Trading(**kwargs)
    obs, _ = env.reset(seed=0)
    memory, ended, rows = policy.new_memory(1), False, []
    while not ended:
        action = policy.act_batch(obs[None], memory=memory)[0]
        obs, _, terminated, ended, _ = env.step(action)
        ended = ended or terminated
        units = [np.atleast_1d(each.units).tolist() for each in (env.fill, env.forced)]
        rows.append((float(env.account.equity), *units, terminated))
    return rows


@pytest.mark.parametrize(
    ("case", "accounts"),
    [
        ("each", ["SYN0", "SYN1"]),
        pytest.param("one", ["SYN1"], marks=pytest.mark.slow),
        ("portfolio", ["portfolio"]),
        pytest.param("stopped", ["SYN0", "SYN1"], marks=pytest.mark.slow),
    ],
    indirect=["case"],
)
def test_a_walk_of_the_test_period_equals_the_env(case: Trained, accounts: list[str]) -> None:
    assert main(command(case, start=start_of_test(case))) == 0

    records = lines("log")
    names = list(records[0]["accounts"])
    assert names == accounts
    ends = [bars.time[-1] for bars in market_bars().values()]
    for name in names:
        expected = backtest(case, name)
        walked = [record["accounts"][name] for record in records[1:]]
        for (equity, filled, forced, _), account in zip(expected, walked, strict=False):
            assert account["equity"] == equity
            units = [each["units"] for each in account["fills"]]
            assert units == [each for each in (*filled, *forced) if each != 0.0]
        if not expected[-1][-1]:  # an account that was not closed is walked to the end
            assert records[-1]["ns"] == min(ends)
            assert len(walked) >= len(expected) - 3  # the last rows may lack a symbol
        else:
            assert walked[len(expected) - 1]["is_closed"]
            assert all(each["order"] is None for each in walked[len(expected) - 1 :])
    assert sum(len(each["accounts"][name]["fills"]) for each in records for name in names) > 3


def loaded(case: Trained) -> PaperPolicy:
    return PaperPolicy(ExportedPolicy.load(case.policy), case.policy)


def walked(policy: PaperPolicy, log: str) -> bytes:
    """Walk all bars in this process and return the log."""
    one_thread = torch_threads(torch.device("cpu"))
    with one_thread, PaperLog.opened(Path(log), {"format": 1}) as opened:
        list(PaperWalk(policy, "prices", opened, start=0).walk())
    return (Path(log) / LOG_FILE).read_bytes()


@pytest.mark.parametrize(
    "case", [pytest.param("each", marks=pytest.mark.slow), "portfolio"], indirect=True
)
def test_a_log_that_ends_at_any_byte_continues_to_the_same_log(case: Trained) -> None:
    policy = loaded(case)
    whole = walked(policy, "whole")
    newlines = [index + 1 for index, each in enumerate(whole) if each == ord("\n")]
    draw = random.Random(0)
    ends = [5, newlines[1], newlines[-1], *draw.sample(range(len(whole)), 6)]
    assert len(newlines) > 100

    for end in ends:
        folder = Path(f"cut_{end}")
        folder.mkdir()
        (folder / LOG_FILE).write_bytes(whole[:end])

        assert walked(policy, str(folder)) == whole


@pytest.mark.slow
def test_files_that_grow_at_different_times_give_the_same_log(case: Trained) -> None:
    policy = loaded(case)
    whole = walked(policy, "whole")
    draw = random.Random(1)
    content = {path: path.read_bytes() for path in sorted(case.prices.iterdir())}
    # All bars that the features need, then pieces that end within a line.
    shown = {path: len(data) * 2 // 3 for path, data in content.items()}

    while any(shown[path] < len(data) for path, data in content.items()):
        path = draw.choice(list(content))
        shown[path] = min(shown[path] + draw.randrange(1, 9_000), len(content[path]))
        for each, data in content.items():
            each.write_bytes(data[: shown[each]])
        walked(policy, "grown")

    assert (Path("grown") / LOG_FILE).read_bytes() == whole


DRIVER = """
import os, random, signal, sys, time
import torch
import ml_pipeline.worlds.trading.paper, ml_pipeline.assembly.build
from ml_pipeline.__main__ import main
from ml_pipeline.assembly.load import export_run
from ml_pipeline.assembly.run import train
from ml_pipeline.deploy.exported import ExportedPolicy

# Import everything once: a child that is killed soon must get far.
torch.set_num_threads(1)
ExportedPolicy.load(sys.argv[3])
n_kills, arguments = int(sys.argv[1]), sys.argv[2:]
draw = random.Random(7)
paths = [f"prices/{name}" for name in sorted(os.listdir("whole_prices"))]
content = {path: open(f"whole_{path}", "rb").read() for path in paths}
shown = {path: len(content[path]) // 3 for path in paths}
for path in paths:
    open(path, "wb").write(content[path][: shown[path]])

def grow():
    path = draw.choice(paths)
    size = draw.randrange(1, len(content[path]) // (2 * n_kills))
    with open(path, "ab") as file:
        file.write(content[path][shown[path] : shown[path] + size])
    shown[path] += size

def progress():
    n_lines = open(log).read().count("\\n") if os.path.exists(log) else 0
    return open("output").read().count("continues after"), n_lines > 1

output = os.open("output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
log = arguments[-1] + "/paper.jsonl"
for kill in range(n_kills):
    before = progress()
    child = os.fork()
    if child == 0:
        os.dup2(output, 1)
        os._exit(main(arguments))
    deadline = time.monotonic() + 60.0
    # Every third one gets far, on a slow machine too.
    while kill % 3 == 0 and progress() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(4):
        time.sleep(draw.random() * 0.3)
        grow()
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"ended by itself with {status}"
for path in paths:
    open(path, "wb").write(content[path])
sys.exit(main([each for each in arguments if each != "--follow"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, to start processes quickly")
def test_a_process_killed_many_times_while_files_grow_writes_the_same_log(case: Trained) -> None:
    assert main(command(case, "--log", "whole")) == 0
    shutil.copytree("prices", "whole_prices")

    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "12", *command(case, "--follow", "--log", "killed")],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert Path("output").read_text().count("continues after") >= 3
    killed, whole = (Path(name) / LOG_FILE for name in ("killed", "whole"))
    assert killed.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_ctrl_c_ends_a_process_that_follows_and_the_same_command_continues(case: Trained) -> None:
    assert main(command(case, "--log", "whole")) == 0
    path, log = case.prices / "SYN0.csv", Path("log") / LOG_FILE
    content = path.read_text()
    path.write_text("\n".join(content.splitlines()[: N_BARS // 2]) + "\n2020")
    with subprocess.Popen(
        [sys.executable, "-m", "ml_pipeline", *command(case, "--follow")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: log.is_file() and log.read_text().count("\n") > 50, 60.0)
        before = log.read_text()
        path.write_text(content)
        wait_until(lambda: len(log.read_text()) > len(before), 60.0)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "nothing is lost" in output
    assert main(command(case)) == 0
    assert log.read_bytes() == (Path("whole") / LOG_FILE).read_bytes()


def fails(capsys: Capture, case: Trained, *arguments: str, start: str = "2020-01-01") -> str:
    capsys.readouterr()
    assert main(command(case, *arguments, start=start)) == 1
    return error_line(capsys)


def test_mistakes_in_the_data_are_one_line(case: Trained, capsys: Capture) -> None:
    path = case.prices / "SYN0.csv"
    content = path.read_text()

    path.write_text(content.replace("close", "last"))
    assert "SYN0.csv:1: not a known layout: it lacks close; found time open" in fails(capsys, case)
    path.write_text(content.replace("signal", "noise"))
    assert "column signal is missing" in fails(capsys, case)
    bars = market_bars()["SYN0"]
    write_table(path, bars._replace(time=bars.time[0] + 2 * (bars.time - bars.time[0])))
    assert "bar=1h: must be a multiple of the bars of SYN0, which have 2h" in fails(capsys, case)
    path.rename(case.prices / "BTC.csv")
    assert "symbols=SYN0: not in the files; found BTC, SYN1" in fails(capsys, case)
    assert "path=nothing: no such file" in fails(capsys, case, "--data", "nothing")


def test_columns_of_new_files_can_be_named(case: Trained) -> None:
    assert main(command(case, "--log", "plain")) == 0
    for path in case.prices.iterdir():
        path.write_text(path.read_text().replace("close", "last", 1))

    assert main(command(case, "--log", "named", "--column", "close=last")) == 0
    assert lines("named") == lines("plain")


def test_data_that_do_not_continue_the_log_are_refused(case: Trained, capsys: Capture) -> None:
    assert main(command(case)) == 0
    last = lines("log")[-1]["time"]
    before = (Path("log") / LOG_FILE).read_bytes()

    for symbol, bars in market_bars().items():
        later = bars._replace(time=bars.time + 10_000 * 3_600_000_000_000)
        write_table(case.prices / f"{symbol}.csv", later)
    assert f"has no bar of {last}, the last one in log/{LOG_FILE}" in fails(capsys, case)
    for symbol, bars in market_bars().items():
        other = bars._replace(close=bars.close * 1.001, high=bars.high * 1.01)
        write_table(case.prices / f"{symbol}.csv", other)
    assert "bars must not change" in fails(capsys, case)
    assert (Path("log") / LOG_FILE).read_bytes() == before


def test_bars_of_the_training_data_are_walked_only_with_a_start(
    case: Trained, capsys: Capture
) -> None:
    assert main(["paper", str(case.policy), "--data", "prices"]) == 1
    assert "has no bar after" in error_line(capsys)

    bars = market_bars()
    for symbol, each in bars.items():
        more = each._replace(time=each.time + 24 * 3_600_000_000_000)
        write_table(case.prices / f"{symbol}.csv", more)
    assert main(["paper", str(case.policy), "--data", "prices"]) == 0
    (folder,) = Path("paper").iterdir()
    trained_until = max(int(each.time[-1]) for each in bars.values())
    records = lines(str(folder))
    assert records[0]["ns"] > trained_until
    assert 5 < len(records) <= 24


def test_a_log_belongs_to_one_process_and_one_policy(case: Trained, capsys: Capture) -> None:
    lock = FileLock(Path("log"))
    Path("log").mkdir()
    assert lock.take(wait=False)
    assert fails(capsys, case) == (
        "--log log: another process writes to it; stop it, or use another folder"
    )
    lock.release()
    assert main(command(case)) == 0

    assert "was started with start=2020-01-01" in fails(capsys, case, start="2020-01-05")
    log = Path("log") / LOG_FILE
    log.write_text(log.read_text().replace('"policy": "', '"policy": "0'))
    assert "was started with policy=0" in fails(capsys, case)


@pytest.mark.parametrize("case", ["stopped"], indirect=True)
def test_a_walk_ends_when_its_accounts_are_closed(case: Trained, capsys: Capture) -> None:
    for _ in range(2):
        assert main(command(case, "--follow")) == 0
        assert "has closed every account" in capsys.readouterr().out

    records = lines("log")
    assert len(records) < N_BARS - 50
    closed = [[a["is_closed"] for a in each["accounts"].values()] for each in records]
    assert all(closed[-1])
    assert not all(closed[-2])


def test_a_policy_of_another_env_is_refused(finished_run: Path, capsys: Capture) -> None:
    assert main(["export", str(finished_run)]) == 0
    capsys.readouterr()

    assert main(["paper", str(finished_run), "--data", "prices"]) == 1

    assert error_line(capsys) == (
        f"{finished_run}/policy.pt2: is a policy of CartPole-v1, without a market; use a policy "
        "of env=trading"
    )


def test_a_policy_with_wrappers_is_refused(case: Trained) -> None:
    policy = ExportedPolicy.load(case.policy)
    policy.metadata["env"]["wrappers"] = {"limit": {"_target_": "gymnasium.wrappers.TimeLimit"}}

    with pytest.raises(PaperError, match="its env has wrappers, limit"):
        PaperPolicy(policy, case.policy)
