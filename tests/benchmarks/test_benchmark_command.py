"""The benchmark command: it runs without the other programs, counts quiet pairs, and judges by the stated bars."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the command, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER / "run.py"), *arguments], capture_output=True, text=True)


def test_it_measures_ours_alone_where_no_rival_is_to_be_had(tmp_path: Path) -> None:
    small = "--lengths 5,16 --prompt 16 --context 20 --tokens 2 --repeats 1 --patience 1 --isa native --threads 1"
    rows = ["--rows", "decode,context,watched,prefill,logits,looking"]
    made = ["--work", str(tmp_path), "--json"]
    done = command("--model", "toy", "--rivals", "none", *small.split(), *rows, *made)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["machine"]["contenders"]["cutaway"]["threads"] == 1
    assert told["machine"]["read_bytes_per_s"] > 0
    assert {row["group"] for row in told["rows"]} == set(rows[1].split(","))
    for row in told["rows"]:
        assert row["ours"]["median_s"] > 0 and row["ceiling_tokens_per_s"] > 0
        own = row["group"] in ("watched", "looking")
        assert ("ratio" in row) == own and ("left out" in row.get("failed", "")) != own
        assert row["bar"] is None and "met" not in row  # the bars are those of another model


def test_a_row_that_is_not_there_is_refused() -> None:
    done = command("--rows", "decode,dance")
    assert done.returncode == 2 and "no rows 'dance'" in done.stderr


def test_a_rival_that_is_not_installed_is_named_with_what_installs_it(part: Any, monkeypatch: Any) -> None:
    rivals = part("rivals")
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else object())
    assert rivals.missing() == {"llama.cpp": "pip install llama-cpp-python"}


def test_bars_are_those_that_were_set(part: Any) -> None:
    rows = {row.what: row for row in part("rows").rows(part("rows").Sizes())}
    bars = {what: row.bar for what, row in rows.items() if row.judged != "slower"}
    assert bars == {
        "decode": 1.3,
        "decode, as Q4_0": 1.1,
        "decode, as Q8_0": 1.1,
        "decode, as Q4_K_M": 1.1,
        "decode ÷ transformers": None,
        "decode at 2000 tokens": 1.2,
        "decode beside a busy process": 1.0,
        "decode, residuals and patterns kept": 0.6,
        "prefill 512": 2.5,
        "prefill 512, as Q4_0": 1.3,
        "prefill 512 ÷ CTranslate2 int8": 0.9,
        "pass with all logits, T = 5": 4.0,
        "pass with all logits, T = 64": 1.8,
        "pass with all logits, T = 512": 1.5,
        "run_with_cache, T = 64": 2.5,
        "run_with_cache, T = 512": 2.5,
    }
    looking = [row for row in rows.values() if row.judged == "slower" and "512" in row.what]
    assert [row.bar for row in looking] == pytest.approx([1 / 30 + 0.05, 1 / 30 + 0.05, 0.05, 0.4])


def test_what_transformer_lens_keeps_is_all_found_in_the_model(part: Any) -> None:
    from cutaway.points import find_points
    from cutaway.spec.catalog import CATALOG

    spec = CATALOG["smollm2-135m"]()
    found = find_points(part("rows").TRANSFORMER_LENS, spec)
    assert len(found) == 3 + 18 * spec.n_layers


class Clock:
    """Each run lasts a second, in which others take what is listed for its pair."""

    def __init__(self, elsewhere: list[float]) -> None:
        self.elsewhere = iter([share for share in elsewhere for _ in range(2)])

    def now(self, processes: Any) -> "Clock":
        return self

    def others_since(self, before: "Clock") -> tuple[float, float]:
        return next(self.elsewhere), 1.0


def turns(part: Any, monkeypatch: Any, elsewhere: list[float], ours: list[float], most: int) -> Any:
    pairing = part("pairing")
    monkeypatch.setattr(pairing, "REST", 0)
    monkeypatch.setattr(pairing, "Usage", Clock(elsewhere))
    runs = iter([0.0, *ours])  # the first is not measured
    return pairing.in_turns(lambda: next(runs), lambda: 2.0, 2, quiet=0.1, most=most, processes=[])


def test_pairs_that_others_disturbed_are_run_again(part: Any, monkeypatch: Any) -> None:
    kept = turns(part, monkeypatch, [0.0, 0.9, 0.05], [1.0, 0.1, 1.2], most=6)
    assert [turn.ours for turn in kept.kept] == [1.0, 1.2] and kept.set_aside == 1


def test_where_it_never_is_quiet_the_least_disturbed_pairs_count_whatever_their_times(
    part: Any, monkeypatch: Any
) -> None:
    kept = turns(part, monkeypatch, [0.9, 0.3, 0.8, 0.2], [0.1, 5.0, 0.1, 7.0], most=4)
    assert [turn.ours for turn in kept.kept] == [5.0, 7.0] and kept.set_aside == 2
    assert kept.elsewhere == pytest.approx(0.25)


def figures(part: Any, judged: str, bar: float, pairs: list[tuple[float, float]]) -> Any:
    pairing, rows, report = part("pairing"), part("rows"), part("report")
    side = rows.Side("cutaway", "logits", {})
    row = rows.Row("looking", "a row", side, side, 10, 1, judged, bar)
    measured = pairing.Turns([pairing.Turn(ours, theirs, 0.0) for ours, theirs in pairs], 0)
    return report.figures(row, measured, 1000, 2000.0)


def test_the_ratio_is_the_median_of_the_pairs_ratios_and_reading_alone_stands_beside(part: Any) -> None:
    told = figures(part, "faster", 2.0, [(1.0, 2.0), (2.0, 2.0), (1.0, 9.0)])
    assert told["ratio"] == 2.0 and (told["ratio_min"], told["ratio_max"]) == (1.0, 9.0) and told["met"]
    assert told["one_read_s"] == 0.5 and told["ceiling_tokens_per_s"] == 20


@pytest.mark.parametrize(("ours", "met"), [(1.04, True), (1.06, False)])
def test_looking_must_not_slow_a_pass_by_more_than_its_bar(part: Any, ours: float, met: bool) -> None:
    told = figures(part, "slower", 0.05, [(ours, 1.0)])
    assert told["ratio"] == pytest.approx(ours - 1) and told["met"] is met
    assert ("**no**" in part("report").table([told])) is not met


def test_a_worker_that_dies_is_told_by_its_last_words(part: Any) -> None:
    lines = part("lines")
    worker = lines.Worker([sys.executable, "-c", "raise SystemExit('no such instruction')"], {})
    with pytest.raises(lines.WorkerFailed, match="status 1: no such instruction"):
        worker.about()
    worker.close()


def test_all_sides_are_held_to_the_same_threads_and_instructions(part: Any) -> None:
    around = part("contenders").environment(2, "avx2")
    assert (
        {around[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {around["CUTAWAY_THREADS"]} == {"2"}
    )
    assert "avx512" not in around["NUMBA_CPU_FEATURES"] and around["ATEN_CPU_CAPABILITY"] == "avx2"


def test_the_bars_of_generation_are_measured_in_rounds_and_judged_by_the_median_ratio(part: Any) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "serving.py"), "--model", "toy", "--only", "sampling", "--rounds", "1", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["sampling"]
    assert told["rounds"] == 20 and told["smallest"] <= told["ratio"] <= told["largest"] and told["bar"] == 0.1
    serving = part("serving")
    found = serving.judged("streams", [(20.0, 10.0), (21.0, 10.0), (90.0, 10.0)])
    assert (found["ratio"], found["smallest"], found["largest"], found["met"]) == (2.1, 2.0, 9.0, True)
    assert serving.judged("turns", [(9.0, 1.0)])["met"] is False
    assert serving.judged("sampling", [(0.2, 1.0)])["met"] is False
    assert serving.told("streams", found).endswith("ratio  2.100 (2.000 to 9.000, 3 rounds), at least 2: met")


def test_a_bar_that_is_not_there_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "serving.py"), "--only", "dance"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "There is no part 'dance'; there are sampling, streams, turns." in done.stderr
