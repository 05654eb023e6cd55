"""`cutaway trace`: one pass over a text, stage by stage."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.arguments import add_model, add_prompt, load_model, print_json, read_prompt
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.points import Point
    from cutaway.spec import ModelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    add_model(parser)
    parser.add_argument(
        "--layer", type=int, metavar="N", help="show this layer's stages (0 if not given; -1 is the last)"
    )
    parser.add_argument("--head", type=int, metavar="H", help="draw the attention pattern of this head of the layer")
    parser.add_argument(
        "--point", metavar="ADDRESS", help="show one tensor in full, such as layers.3.attn.pattern; --head picks a head"
    )
    parser.add_argument(
        "--edit",
        action="append",
        default=[],
        metavar="JSON",
        help='change the pass: --edit \'{"zero": "layers.3.attn.z", "heads": [5]}\', or run it with a LoRA adapter: '
        '--edit \'{"adapter": "its folder"}\'; as often as wanted',
    )
    parser.add_argument("--top", type=int, metavar="N", help="how many next tokens to show (10)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="also write what was captured to this safetensors file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document (its numbers in full)")


def run(options: argparse.Namespace) -> int:
    prompt = read_prompt(options)
    model = load_model(options)

    from cutaway.points import parse_point
    from cutaway.trace.capture.plan import overview_points
    from cutaway.trace.drawing.overview import draw_opening
    from cutaway.trace.drawing.report import head_index, layer_index, opening, report
    from cutaway.trace.edits import read_edits

    # Whatever can be refused is refused before the pass is run.
    spec = model.spec
    point = None if options.point is None else parse_point(options.point, spec)
    _refuse_idle(options, spec, point)
    layer = layer_index(spec, options.layer if options.layer is not None else (point.layer if point else 0) or 0)
    head = None if options.head is None else head_index(spec, layer, options.head)
    top = 10 if options.top is None else options.top
    told = model.prompt(prompt)
    edits = read_edits(options.edit)
    wanted = overview_points(spec, layer)
    points = wanted if point is None else [*wanted, point]
    model.plan(told.ids, points, edits=edits)
    opened = sys.stdout.isatty() and not options.json
    if opened:  # so that there is something to look at while a long pass runs
        draw_opening(opening(spec, model.engine.name, model.engine.dtype.name, told, model.origin))
    trace = model.trace(prompt, points, edits=edits)
    if options.save is not None:
        saved = trace.save(options.save)
        print(f"cutaway: {len(trace.points)} tensors written to {saved}", file=sys.stderr)
    if options.json:
        print_json(report(trace, layer, head, top, point, model.origin))
        return 0

    if point is not None:
        from cutaway.trace.drawing.tensor import draw_point

        draw_point(trace, point, head=head, origin=model.origin, opened=opened)
    elif head is not None:
        from cutaway.trace.drawing.heatmap import draw_head

        draw_head(trace, layer, head, origin=model.origin, opened=opened)
    else:
        from cutaway.trace.drawing.overview import draw_trace

        draw_trace(trace, layer, top=top, origin=model.origin, opened=opened)
    return 0


def _refuse_idle(options: argparse.Namespace, spec: "ModelSpec", point: "Point | None") -> None:
    """Raise CutawayError for an option that would change nothing of what is shown, or contradicts another."""
    from cutaway.trace.drawing.report import layer_index

    if options.top is not None and options.top < 1:
        raise CutawayError(f"--top is {options.top}; ask for at least 1.")
    if point is not None and options.layer is not None and point.layer not in (None, layer_index(spec, options.layer)):
        raise CutawayError(f"{point} stands in layer {point.layer}, and --layer is {options.layer}; leave one out.")
    if options.json:  # which holds the stages and the next tokens whatever else is asked for
        return
    if options.top is not None and (point is not None or options.head is not None):
        shown = "--point" if point is not None else "--head"
        raise CutawayError(f"--top counts next tokens, which {shown} does not show; leave out one of the two.")
    if point is None:
        return
    if options.layer is not None and point.layer is None:
        raise CutawayError(f"{point} stands outside the layers; leave --layer out.")
    if options.head is not None and not {"H", "H_kv"} & set(point.info.shape):
        raise CutawayError(f"{point} is [{', '.join(point.info.shape)}] and has no heads; leave --head out.")
