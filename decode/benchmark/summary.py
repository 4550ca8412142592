"""Figures of a run from its rows: totals, medians with spread, comparisons on the prompts that two methods share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from decode.measure import spread

Row = Mapping[str, Any]
BASELINES = ("plain", "generate")
RESAMPLES = 2000


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures of a run.

    `methods`: by temperature and method, over all its prompts. `comparisons`: by temperature, a method against a
    baseline over the prompts that both have answered. Identity rows, where there are any, in `identity` by method.
    """
    measured = [row for row in rows if row["kind"] == "answer"]
    checked = [row for row in rows if row["kind"] == "identity"]
    by_run: dict[tuple[float, str], list[Row]] = {}
    for row in measured:
        by_run.setdefault((row["temperature"], row["method"]), []).append(row)
    temperatures = sorted({temperature for temperature, _ in by_run})
    methods = {str(t): {m: figures(found) for (at, m), found in by_run.items() if at == t} for t in temperatures}
    comparisons = {
        str(t): {
            baseline: {
                method: compare(found, by_run[t, baseline])
                for (at, method), found in by_run.items()
                if at == t and method != baseline and shared_ids(found, by_run[t, baseline])
            }
            for baseline in BASELINES
            if (t, baseline) in by_run
        }
        for t in temperatures
    }
    result: dict[str, Any] = {"methods": methods, "comparisons": comparisons}
    if checked:
        methods_checked = dict.fromkeys(row["method"] for row in checked)
        result["identity"] = {m: identity([row for row in checked if row["method"] == m]) for m in methods_checked}
    return result


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Speed is all tokens ÷ all seconds; acceptance length all tokens ÷ all forward passes of the base."""
    tokens, seconds = sum(row["new_tokens"] for row in rows), sum(row["seconds"] for row in rows)
    said = all(row["forwards"] is not None for row in rows)
    forwards = sum(row["forwards"] for row in rows) if said else None
    return {
        "prompts": len(rows),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "forwards": forwards,
        "acceptance_length": None if forwards is None else tokens / forwards,
    }


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of one method: totals, quartiles over prompts, acceptance histogram, by category."""
    categories = sorted({row["category"] for row in rows})
    return {
        **(found := totals(rows)),
        "tokens_per_second_quartiles": spread([row["new_tokens"] / row["seconds"] for row in rows]),
        "acceptance_length_quartiles": None
        if found["forwards"] is None
        else spread([row["new_tokens"] / row["forwards"] for row in rows]),
        "acceptance_histogram": add_up([row["histogram"] for row in rows]),
        "overhead_share": overhead_share(rows),
        "categories": {name: totals([row for row in rows if row["category"] == name]) for name in categories},
    }


def overhead_share(rows: Sequence[Row]) -> float | None:
    """Of the time after the prompt, what is not the base's forward pass: drafting, verifying, committing, and what no
    stage counts. None for methods that do not say."""
    if not all(row["stages"] for row in rows):
        return None
    decoding = sum(row["seconds"] - row["stages"]["prefill"] for row in rows)
    return 1.0 - sum(row["stages"]["forward"] for row in rows) / decoding if decoding > 0.0 else None


def add_up(histograms: Sequence[Sequence[int]]) -> list[int]:
    length = max((len(histogram) for histogram in histograms), default=0)
    return [sum(histogram[n] for histogram in histograms if n < len(histogram)) for n in range(length)]


def shared_ids(ours: Sequence[Row], theirs: Sequence[Row]) -> list[str]:
    return sorted({row["id"] for row in ours} & {row["id"] for row in theirs})


def compare(ours: Sequence[Row], theirs: Sequence[Row]) -> dict[str, Any]:
    """One method against a baseline, over the prompts that both have answered.

    `speedup` is the ratio of total speeds, with a 95 % interval over resampled prompts; `per_prompt` the quartiles of
    the prompts' own ratios; `same_text` counts answers with the same tokens.
    """
    ids = shared_ids(ours, theirs)
    own, other = ({row["id"]: row for row in rows} for rows in (ours, theirs))
    pairs = [(own[i], other[i]) for i in ids]
    categories = sorted({row["category"] for row, _ in pairs})
    return {
        "prompts": len(pairs),
        "speedup": ratio(pairs),
        "interval": interval(pairs),
        "per_prompt": spread([ratio([pair]) for pair in pairs]),
        "same_text": sum(a["digest"] == b["digest"] for a, b in pairs),
        "categories": {name: ratio([pair for pair in pairs if pair[0]["category"] == name]) for name in categories},
    }


def ratio(pairs: Sequence[tuple[Row, Row]]) -> float:
    """Total speed of the first ÷ that of the second."""
    speed = [sum(pair[i]["new_tokens"] for pair in pairs) / sum(pair[i]["seconds"] for pair in pairs) for i in (0, 1)]
    return speed[0] / speed[1]


def interval(pairs: Sequence[tuple[Row, Row]], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of `ratio` over prompts drawn with replacement (percentile bootstrap)."""
    draws = random.Random(seed)
    found = sorted(ratio(draws.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return found[round(0.025 * (RESAMPLES - 1))], found[round(0.975 * (RESAMPLES - 1))]


def identity(rows: Sequence[Row]) -> dict[str, Any]:
    """How many answers were the base's own, and every exception."""
    compared = [row for row in rows if row["same_as_plain"] is not None]
    other = [row for row in compared if not row["same_as_plain"]]
    return {
        "prompts": len(rows),
        "compared_with_plain": len(compared),
        "same_as_plain": len(compared) - len(other),
        "tokens": sum(row["new_tokens"] for row in rows),
        "base_argmax_everywhere": sum(not row["exceptions"] for row in rows),
        "differences": [{key: row[key] for key in ("id", "first_difference", "top_two_gap")} for row in other],
        "exceptions": [{"id": row["id"], **exception} for row in rows for exception in row["exceptions"]],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The result as Markdown tables."""
    parts = []
    for temperature, methods in result["methods"].items():
        parts += [f"### {'Greedy' if float(temperature) == 0.0 else f'Sampling, temperature {temperature}'}", ""]
        parts += [*_method_table(methods, result["comparisons"][temperature]), ""]
        parts += [*_category_table(methods, result["comparisons"][temperature]), ""]
    for name, found in result.get("identity", {}).items():
        said = (
            f"Greedy text of {name} is the base's own choice at every token on {found['base_argmax_everywhere']} of "
            f"{found['prompts']} prompts"
        )
        if found["compared_with_plain"]:
            said += (
                f", and equals this engine's plain text on {found['same_as_plain']} of the "
                f"{found['compared_with_plain']} that were decoded plainly too"
            )
        parts += [f"{said}.", ""]
    return "\n".join(parts)


def _method_table(methods: Mapping[str, Any], comparisons: Mapping[str, Any]) -> list[str]:
    head = ["method", "prompts", "tokens/s", "quartiles over prompts", "acceptance length"]
    head += [f"× {baseline}" for baseline in comparisons]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, found in methods.items():
        low, middle, high = found["tokens_per_second_quartiles"]
        cells = [
            name,
            str(found["prompts"]),
            f"{found['tokens_per_second']:.1f}",
            f"{low:.1f} / {middle:.1f} / {high:.1f}",
        ]
        cells.append(_length(found))
        cells += [_against(compared.get(name)) for compared in comparisons.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _length(found: Mapping[str, Any]) -> str:
    length = found["acceptance_length"]
    return "–" if length is None else f"{length:.2f}"


def _against(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    low, high = found["interval"]
    return f"{found['speedup']:.2f} ({low:.2f}–{high:.2f}, {found['prompts']} prompts)"


def _category_table(methods: Mapping[str, Any], comparisons: Mapping[str, Any]) -> list[str]:
    """Acceptance length and speed-up over plain decoding, by category, of the methods that were compared with it."""
    names = list(comparisons.get("plain", {}))
    if not names:
        return []
    lines = [
        "| category | " + " | ".join(f"{name}: acceptance length | × plain" for name in names) + " |",
        "|---|" + "---|---|" * len(names),
    ]
    for category in sorted({category for name in names for category in methods[name]["categories"]}):
        cells = [category]
        for name in names:
            own = methods[name]["categories"].get(category)
            speedup = comparisons["plain"][name]["categories"].get(category)
            cells += ["–" if own is None else _length(own)]
            cells += ["–" if speedup is None else f"{speedup:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
