/** The six steps of one head: their names, and the part of a tensor that is this head's. */
import type { Tensor } from "../api";
import type { LayerKind } from "../protocol";
import type { Codes } from "./matrix";

export interface Step {
  point: string;
  /** What is done, as it is written. */
  name: string;
  /** The same, as it is spoken. */
  spoken: string;
}

/** From dot products to what the head adds, those that this kind of layer has. */
export function stepsOf(kind: LayerKind): Step[] {
  const formula = (name: string) => kind.points.find((point) => point.name === name)?.formula ?? "";
  const scores = formula("attn.scores");
  const hides = formula("attn.masked").includes("\\infty");
  const divided = scores.includes("sqrt");
  const capped = scores.includes("tanh") ? ", cap" : "";
  const all: Step[] = [
    { point: "attn.dots", name: "QKᵀ", spoken: "queries times keys" },
    { point: "attn.scores", name: (divided ? "÷ √d" : "scale") + capped, spoken: `${divided ? "divided by the root of d" : "scaled"}${capped && " and capped"}` },
    { point: "attn.masked", name: hides ? "mask" : "no mask", spoken: hides ? "masked" : "nothing is masked" },
    { point: "attn.pattern", name: "softmax", spoken: "softmax" },
    { point: "attn.z", name: "× V", spoken: "times the values" },
    { point: "attn.head_out", name: "× W_O", spoken: "through the output weights" },
  ];
  return all.filter((step) => kind.points.some((point) => point.name === step.point));
}

/** One head's codes: of a tensor that came with all heads its own, else all that came. */
export function ofHead(tensor: Tensor, head: number): Codes {
  const [heads, rows, columns] = tensor.shape;
  const size = rows * columns;
  const at = heads > 1 ? Math.min(head, heads - 1) * size : 0;
  return { codes: tensor.u8!.subarray(at, at + size), rows, columns, kind: tensor.kind };
}

/** Whether two drawings of a step differ: in a cell, or in what its colours stand for. */
export function differ(one: Tensor, other: Tensor, head: number): boolean {
  const [a, b] = [ofHead(one, head).codes, ofHead(other, head).codes];
  return one.scale !== other.scale || a.length !== b.length || a.some((code, i) => code !== b[i]);
}
