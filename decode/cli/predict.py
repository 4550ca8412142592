"""`medusa-decode predict`: what speculation earns, from an acceptance rate, a draft length and costs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from decode.cli import common
from medusa_heads.errors import UserError


def predict(
    alpha: Annotated[float, typer.Option("--alpha", metavar="A", help="Probability that a drafted token is accepted.")],
    gamma: Annotated[int, typer.Option("--gamma", metavar="G", min=0, help="Drafted tokens a round.")],
    draft_cost: Annotated[
        float, typer.Option("--draft-cost", min=0.0, help="Of one drafted token, in passes of the base over one token.")
    ] = 0.0,
    verify_cost: Annotated[
        float | None,
        typer.Option("--verify-cost", help="Of the pass over all nodes; default 1, or the roofline's with a device."),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option("--parameters", metavar="N", help="Of the base, e.g. 7e9: for the roofline.")
    ] = None,
    bytes_per_parameter: Annotated[float, typer.Option("--bytes-per-parameter", help="2 for half precision.")] = 2.0,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", metavar="GB/s", help="Memory bandwidth of the device.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option("--flops", metavar="TFLOP/s", help="Arithmetic rate of the device.")
    ] = None,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Expected tokens a round, speed-up and break-even acceptance; with a model's size and a device's bandwidth and
    FLOP rate also the roofline: how many nodes a pass verifies for the price of one."""
    device = (parameters, bandwidth, flops)
    if any(value is not None for value in device) and None in device:
        raise UserError("a roofline needs all of --parameters, --bandwidth and --flops")
    report = describe(alpha, gamma, draft_cost, verify_cost, device, bytes_per_parameter)
    if json_report:
        typer.echo(json.dumps(report))
    else:
        typer.echo("\n".join(lines(report)))


def describe(
    alpha: float,
    gamma: int,
    draft_cost: float,
    verify_cost: float | None,
    device: tuple[float | None, float | None, float | None],
    bytes_per_parameter: float,
) -> dict[str, Any]:
    """The report. `device` is parameters, GB/s, TFLOP/s, or three times None."""
    from decode import speedup

    report: dict[str, Any] = {"alpha": alpha, "gamma": gamma, "draft_cost": draft_cost}
    parameters, bandwidth, flops = device
    if parameters is not None and bandwidth is not None and flops is not None:
        shape = speedup.ModelShape(parameters, bytes_per_parameter)
        machine = speedup.Device(bandwidth * 1e9, flops * 1e12)
        if verify_cost is None:
            verify_cost = speedup.roofline_verify_cost(shape, machine, gamma + 1)
        report["roofline"] = {
            "arithmetic_intensity": speedup.arithmetic_intensity(shape, gamma + 1),
            "ridge": machine.ridge,
            "free_nodes": speedup.free_nodes(shape, machine),
            "plain_milliseconds": 1e3 * speedup.roofline_seconds(shape, machine, 1),
            "verify_milliseconds": 1e3 * speedup.roofline_seconds(shape, machine, gamma + 1),
        }
    verify_cost = 1.0 if verify_cost is None else verify_cost
    tokens = speedup.expected_tokens(alpha, gamma)
    cost = speedup.round_cost(gamma, draft_cost, verify_cost)
    return report | {
        "verify_cost": verify_cost,
        "expected_tokens": tokens,
        "round_cost": cost,
        "speedup": speedup.speedup(tokens, cost),
        "break_even_alpha": speedup.break_even_alpha(gamma, cost),
    }


def lines(report: dict[str, Any]) -> list[str]:
    even = report["break_even_alpha"]
    found = [
        f"expected tokens a round  {report['expected_tokens']:.3f}",
        f"cost of a round          {report['round_cost']:.3f} passes of the base",
        f"speed-up                 {report['speedup']:.3f}",
        f"break-even acceptance    {'none: it cannot pay' if even is None else f'{even:.3f}'}",
    ]
    if "roofline" in report:
        roof = report["roofline"]
        found += [
            f"arithmetic intensity     {roof['arithmetic_intensity']:.2f} FLOP/byte, ridge {roof['ridge']:.2f}",
            f"nodes for the price of 1 {roof['free_nodes']}",
            f"a pass over 1 token      {roof['plain_milliseconds']:.3f} ms at least",
            f"a pass over all nodes    {roof['verify_milliseconds']:.3f} ms at least",
        ]
    return found
