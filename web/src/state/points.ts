/** Addresses and shapes, from what the model's card says. */
import type { LayerKind, ModelCard, PointCard } from "../protocol";

export function layerKind(card: ModelCard, layer: number): LayerKind {
  return card.layers.find((kind) => kind.first <= layer && layer < kind.stop) ?? card.layers[0];
}

export function split(address: string): { layer: number | null; name: string } {
  const found = /^layers\.(\d+)\.(.+)$/.exec(address);
  return found ? { layer: Number(found[1]), name: found[2] } : { layer: null, name: address };
}

export function pointCard(card: ModelCard, address: string): PointCard | null {
  const { layer, name } = split(address);
  if (layer !== null && layer >= card.sizes.N) return null;
  const points = layer === null ? card.points : layerKind(card, layer).points;
  return points.find((point) => point.name === name) ?? null;
}

/** The shape of a point in numbers, in a pass over `tokens` tokens. */
export function shapeOf(card: ModelCard, address: string, tokens: number): number[] {
  const { layer } = split(address);
  const sizes: Record<string, number> = {
    ...card.sizes,
    ...layerKind(card, layer ?? 0).sizes,
    T: tokens,
    S: tokens,
    "1": 1,
  };
  return (pointCard(card, address)?.symbols ?? []).map((symbol) => sizes[symbol]);
}

/** Heads, rows and columns, as slices are asked for: one head where a point has none. */
export function shape3(card: ModelCard, address: string, tokens: number): [number, number, number] {
  const shape = shapeOf(card, address, tokens);
  if (shape.length === 1) return [1, shape[0], 1];
  if (shape.length === 2) return [1, shape[0], shape[1]];
  if (split(address).name === "moe.expert_out") return [shape[1], shape[0], shape[2]];
  return [shape[0], shape[1], shape[2]];
}

/** The index that the server knows a cell by, from head, row and column. */
export function indexOf(address: string, symbols: string[], head: number, row: number, column: number): number[] {
  if (symbols.length === 1) return [row];
  if (symbols.length === 2) return [row, column];
  return split(address).name === "moe.expert_out" ? [row, head, column] : [head, row, column];
}

/** Which head of a point goes with query head `head`: key and value heads are shared by groups. */
export function headFor(card: ModelCard, address: string, head: number, tokens: number): number {
  const { layer } = split(address);
  if (layer === null) return 0;
  const [heads] = shape3(card, address, tokens);
  const queries = layerKind(card, layer).sizes.H;
  return Math.min(heads - 1, Math.floor((head * heads) / queries));
}
