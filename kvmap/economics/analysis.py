"""From latencies and assumptions to every table, and what they say in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmap.economics.break_even import break_even_rows, in_words, spoken
from kvmap.economics.contexts import Contexts, counted
from kvmap.economics.curves import Latencies
from kvmap.economics.outcomes import Quality, outcome_rows
from kvmap.economics.policies import POLICIES, Prices, Workload, serve
from kvmap.economics.surfaces import Axes, cost_surface, time_surface

Row = dict[str, Any]


@dataclass(frozen=True)
class Economics:
    """What came out.

    Attributes:
        policies: one row for each, over all contexts, see `outcome_rows`.
        by_length: takeover and cost by length, see `length_rows`.
        break_even: see `break_even_rows`.
        time_surface, cost_surface: see `kvmap.economics.surfaces`.
        facts: assumptions, as JSON can hold them.
        notes: what of it was assumed or extended, in words.
    """

    policies: list[Row]
    by_length: list[Row]
    break_even: list[Row]
    time_surface: list[Row]
    cost_surface: list[Row]
    facts: Row
    notes: list[str] = field(default_factory=list)

    @property
    def tables(self) -> dict[str, list[Row]]:
        """By the name of its file."""
        return {
            "economics": self.policies,
            "economics_lengths": self.by_length,
            "economics_break_even": self.break_even,
            "economics_time_surface": self.time_surface,
            "economics_cost_surface": self.cost_surface,
        }


def analyse(
    latencies: Latencies,
    contexts: Contexts | None = None,
    workload: Workload | None = None,
    prices: Prices | None = None,
    quality: Quality | None = None,
    axes: Axes | None = None,
) -> Economics:
    """Time to first token and cost of every policy, where each pays, and both surfaces.

    Args:
        latencies: of the pair.
        contexts: how often each length comes; None: the known lengths, each as often.
        workload: what is asked.
        prices: of seconds.
        quality: of answers.
        axes: of the surfaces.

    Raises:
        EconomicsError: lengths of which nothing is known, or a number out of range.
    """
    workload, prices, axes = workload or Workload(), prices or Prices(), axes or Axes()
    contexts = contexts or counted(latencies.lengths.tolist(), origin="every known length, as often")
    served = serve(latencies, contexts.lengths, workload, prices.cached_discount)
    extended = float(contexts.weights @ latencies.outside(contexts.lengths))
    notes = list(latencies.notes)
    if extended:
        notes.append(
            f"{extended:.1%} of the contexts are outside of the {latencies.lengths[0]:,.0f} to "
            f"{latencies.lengths[-1]:,.0f} tokens that are known: their times are extended, not measured"
        )
    return Economics(
        policies=outcome_rows(served, contexts, workload.escalation_rate, prices, quality),
        by_length=length_rows(latencies, workload, prices, axes.lengths),
        break_even=break_even_rows(latencies, contexts, workload, prices),
        time_surface=time_surface(latencies, workload, axes.lengths, axes.gbit_per_s),
        cost_surface=cost_surface(
            latencies, contexts, workload, prices, axes.escalation_rates, axes.price_ratios
        ),
        facts=_facts(latencies, contexts, workload, prices) | {"extended_share": extended},
        notes=notes,
    )


def length_rows(
    latencies: Latencies, workload: Workload, prices: Prices, lengths: Sequence[float] = ()
) -> list[Row]:
    """Every policy at every length, one request.

    Returns:
        Rows {length, policy, takeover_ms, ttft_kept_ms, ttft_escalated_ms, cost}: cost at the workload's
        escalation rate.
    """
    sizes = counted(list(lengths) or latencies.lengths.tolist()).lengths
    served = serve(latencies, sizes, workload, prices.cached_discount)
    costs = {name: served[name].mixed(workload.escalation_rate).cost(prices) for name in POLICIES}
    return [
        {
            "length": float(length),
            "policy": name,
            "takeover_ms": None if name.startswith("always") else float(served[name].takeover_ms[place]),
            "ttft_kept_ms": float(served[name].kept_ms[place]),
            "ttft_escalated_ms": float(served[name].escalated_ms[place]),
            "cost": float(costs[name][place]),
        }
        for place, length in enumerate(sizes)
        for name in POLICIES
    ]


def _facts(latencies: Latencies, contexts: Contexts, workload: Workload, prices: Prices) -> Row:
    return {
        "latencies": latencies.origin,
        "known_lengths": [float(latencies.lengths[0]), float(latencies.lengths[-1])],
        "batch_size": latencies.batch_size,
        "contexts": contexts.origin,
        "mean_length": contexts.mean,
        "escalation_rate": workload.escalation_rate,
        "output_tokens": workload.output_tokens,
        "judged_after": workload.judged_after,
        "decode_batch": workload.decode_batch or latencies.batch_size,
        "gbit_per_s": workload.gbit_per_s,
        "link_ms": workload.link_ms,
        "sent": workload.sent,
        "cached_share": workload.cached_share,
        "source_price": prices.source,
        "target_price": prices.target,
        "source_gpus": prices.source_gpus,
        "target_gpus": prices.target_gpus,
        "gbyte_price": prices.gbyte,
        "cached_discount": prices.cached_discount,
    }


def as_text(found: Economics) -> str:
    """The result as people read it: assumptions, policies, break-evens, notes."""
    return "\n".join(
        [*_said(found.facts), "", *_table(found.policies), "", *_break_evens(found), *_noted(found)]
    )


def _said(facts: Row) -> Iterator[str]:
    link = (
        "shared memory"
        if facts["gbit_per_s"] is None
        else f"{facts['gbit_per_s']:g} Gb/s, {facts['sent']} cache"
    )
    yield f"latencies: {facts['latencies']}, batches of {facts['batch_size']}"
    yield f"contexts: {facts['contexts']}, mean {facts['mean_length']:,.0f} tokens"
    yield (
        f"escalated: {facts['escalation_rate']:.1%} after {facts['judged_after']} of "
        f"{facts['output_tokens']} tokens, written {facts['decode_batch']} at a time; link: {link}; "
        f"cached: {facts['cached_share']:.0%} at {facts['cached_discount']:.0%} off"
    )
    yield (
        f"prices: source {facts['source_price']:g} × {facts['source_gpus']} GPU, "
        f"target {facts['target_price']:g} × {facts['target_gpus']} GPU a second"
    )


def _table(rows: Sequence[Row]) -> list[str]:
    columns = {
        "TTFT mean ms": "ttft_mean_ms",
        "p50": "ttft_p50_ms",
        "p95": "ttft_p95_ms",
        "takeover": "takeover_mean_ms",
        "cost/request": "cost",
        "/ large": "cost_over_always_large",
        "accuracy": "accuracy",
        "cost/correct": "cost_per_correct",
    }
    used = {title: key for title, key in columns.items() if any(row[key] is not None for row in rows)}
    cells = [["", *used]] + [
        [spoken(row["policy"]), *(_cell(row[key]) for key in used.values())] for row in rows
    ]
    widths = [max(len(line[place]) for line in cells) for place in range(len(used) + 1)]
    return [
        line[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in cells
    ]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _break_evens(found: Economics) -> list[str]:
    return [f"* {in_words(row)}" for row in found.break_even]


def _noted(found: Economics) -> list[str]:
    return ["", *(f"note: {note}" for note in found.notes)] if found.notes else []
