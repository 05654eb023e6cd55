/** Interventions as the page offers, names and shows them. */
import type { Edit } from "./api";
import { visible } from "./format";
import type { EditCard, LayerKind, Token } from "./protocol";
import { split } from "./state/points";

export interface Offer {
  label: string;
  why: string;
  edit: Edit;
}

const PARTS: Record<string, string> = {
  mask: "the mask",
  scale: "the division by √d",
  positions: "positions",
  attn: "attention",
  mlp: "feed-forwards",
  "attn.norm": "the norm before attention",
  "mlp.norm": "the norm before the feed-forward",
  "head norms": "the norms of heads",
  "final.norm": "the final norm",
  norms: "any norm",
  "attn.residual": "the residual path around attention",
  "mlp.residual": "the residual path around the feed-forward",
  residuals: "residual paths",
};

/** A part of the architecture that a run can be without, in words. */
export function partName(part: string): string {
  return PARTS[part] ?? part;
}

/** An edit in as few words as tell it apart. `fallback` is how the server says it. */
export function say(edit: Edit, tokens: Token[], fallback = ""): string {
  const kind = Object.keys(edit)[0];
  const at = String(edit[kind]);
  const layer = /^layers\.(\d+)\./.exec(at)?.[1];
  const heads = (edit.heads as number[] | undefined)?.join(", ");
  const of = layer === undefined ? "" : `layer ${layer}, `;
  const name = (position: number) => (tokens[position] ? `“${visible(tokens[position].piece)}”` : `position ${position}`);
  if (kind === "without") return `without ${partName(at)}`;
  if (kind === "zero" && at.endsWith("attn.z") && heads) return `${of}head ${heads} off`;
  if (kind === "zero" && at.endsWith("attn.out")) return `${of}attention off`;
  if (kind === "zero" && at.endsWith("mlp.out")) return `${of}feed-forward off`;
  if (kind === "zero" && edit.neurons) return `${of}neuron ${(edit.neurons as number[]).join(", ")} off`;
  if (kind === "drop" && edit.experts) return `${of}expert ${(edit.experts as number[]).join(", ")} off`;
  if (kind === "drop" && edit.keys) return `nobody else reads ${(edit.keys as number[]).map(name).join(", ")}`;
  if (kind === "knockout") {
    const edges = (edit.edges as [number, number][]).map(([q, k]) => `${name(q)} no longer looks at ${name(k)}`);
    return `${of}head ${heads}: ${edges.join(", ")}`;
  }
  return fallback || JSON.stringify(edit);
}

/** What can be done to whatever is chosen now, nearest things first. */
export function offers(
  kind: LayerKind,
  layer: number,
  head: number,
  pinned: string | null,
  cell: [number, number] | null,
  token: number | null,
  tokens: Token[],
  expert: number | null = null,
): Offer[] {
  const found: Offer[] = [];
  const has = (name: string) => kind.points.some((point) => point.name === name);
  const at = pinned ? split(pinned) : null;
  const square = at && kind.points.find((point) => point.name === at.name)?.symbols.at(-1) === "S";
  if (at && at.layer === layer && square && cell && cell[1] <= cell[0]) {
    found.push({
      label: `cut ${cell[0]} → ${cell[1]}`,
      why: `Token ${cell[0]} no longer looks at token ${cell[1]} in this head; the rest of its row takes the weight.`,
      edit: { knockout: `layers.${layer}.attn.masked`, heads: [head], edges: [cell] },
    });
  }
  if (at && at.layer === layer && cell && /^mlp\.(gate|up|act)$/.test(at.name)) {
    found.push({
      label: `neuron ${cell[1]} off`,
      why: "0 in its place, at every token.",
      edit: { zero: `layers.${layer}.mlp.act`, neurons: [cell[1]] },
    });
  }
  const routed = at && at.layer === layer && cell && /^moe\.(router_logits|scores)$/.test(at.name) ? cell[1] : null;
  for (const e of new Set([expert, routed])) if (e !== null && has("moe.scores")) found.push(expertOff(layer, e));
  found.push({
    label: `head ${head} off`,
    why: `Head ${head} of layer ${layer} adds nothing: its mix of values becomes 0.`,
    edit: { zero: `layers.${layer}.attn.z`, heads: [head] },
  });
  if (token !== null && tokens.length > 1) {
    found.push({
      label: `hide “${visible(tokens[token].piece)}”`,
      why: "No other token may look at it, in any layer.",
      edit: { drop: "layers.*.attn.masked", keys: [token] },
    });
  }
  if (has("attn.out")) {
    found.push({
      label: "attention off",
      why: `Layer ${layer} adds nothing from other tokens.`,
      edit: { zero: `layers.${layer}.attn.out` },
    });
  }
  if (has("mlp.out")) {
    found.push({
      label: "feed-forward off",
      why: `The feed-forward of layer ${layer} adds nothing.`,
      edit: { zero: `layers.${layer}.mlp.out` },
    });
  }
  return found;
}

/** Without an expert: the router chooses among the others. */
export function expertOff(layer: number, expert: number): Offer {
  return {
    label: `expert ${expert} off`,
    why: "The router cannot choose it; its tokens go to the next best.",
    edit: { drop: `layers.${layer}.moe.scores`, experts: [expert] },
  };
}

/** What an edit touches at a point: heads or experts (all where there are none), edges and keys of a pattern. */
export interface Scar {
  heads: number[];
  edges: [number, number][];
  keys: number[];
}

/** Points of a layer that the edits acted at, and what of them they touch. */
export function scarsOf(edits: EditCard[], layer: number): Map<string, Scar[]> {
  const found = new Map<string, Scar[]>();
  for (const card of edits) {
    for (const address of card.points) {
      const at = split(address);
      if (at.layer !== layer) continue;
      const { heads, experts, edges, keys } = card.edit as Partial<Record<string, number[]>>;
      const name = at.name === "attn.masked" ? "attn.pattern" : experts ? "moe.expert_out" : at.name;
      const scar = { heads: experts ?? heads ?? [], edges: (edges ?? []) as unknown as [number, number][], keys: keys ?? [] };
      found.set(name, [...(found.get(name) ?? []), scar]);
    }
  }
  return found;
}

/** Σ p ln(p / q): how far the distribution q has moved from p, in nats. */
export function divergence(p: Float64Array, q: Float64Array): number {
  let sum = 0;
  for (let i = 0; i < p.length; i++) if (p[i] > 0) sum += p[i] * Math.log(p[i] / Math.max(q[i], 1e-300));
  return Math.max(0, sum);
}
