"""`cutaway trace`: one pass over a text, stage by stage."""

import argparse
import sys
from pathlib import Path

from cutaway.cli.arguments import add_model, add_prompt, load_model, print_json, read_prompt


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
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many next tokens to show (10)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="also write what was captured to this safetensors file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document (its numbers in full)")


def run(options: argparse.Namespace) -> int:
    prompt = read_prompt(options)
    model = load_model(options)

    from cutaway.points import parse_point
    from cutaway.trace.plan import overview_points
    from cutaway.trace.report import head_index, layer_index, report

    # Whatever can be refused is refused before the pass is run.
    spec = model.spec
    point = None if options.point is None else parse_point(options.point, spec)
    layer = layer_index(spec, options.layer if options.layer is not None else (point.layer if point else 0) or 0)
    head = None if options.head is None else head_index(spec, layer, options.head)
    wanted = overview_points(spec, layer)
    trace = model.trace(prompt, points=wanted if point is None else [*wanted, point])
    if options.save is not None:
        saved = trace.save(options.save)
        print(f"cutaway: {len(trace.points)} tensors written to {saved}", file=sys.stderr)
    if options.json:
        print_json(report(trace, layer, head, options.top, point, model.origin))
        return 0

    if point is not None:
        from cutaway.trace.tensor import draw_point

        draw_point(trace, point, head=head, origin=model.origin)
    elif head is not None:
        from cutaway.trace.heatmap import draw_head

        draw_head(trace, layer, head, origin=model.origin)
    else:
        from cutaway.trace.draw import draw_trace

        draw_trace(trace, layer, top=options.top, origin=model.origin)
    return 0
