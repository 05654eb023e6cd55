/** Fetching what the views draw of a pass, in as few answers as can be. */
import { api, type RunRequest, type SliceRequest, type Tensor } from "../api";
import type { Manifest, ModelCard } from "../protocol";
import { ranked } from "../sampling";
import { type Atlas, emptyAtlas, receive } from "../draw/atlas";
import type { View } from "./permalink";
import { layerKind, pointCard } from "./points";

/** Everything that a view draws of one pass; replaced at once when the next pass has come. */
export interface Shown {
  manifest: Manifest;
  card: ModelCard;
  logits: Float32Array | null;
  order: Int32Array;
  /** Lengths of rows, `[places, tokens]`, the largest of them all, and of each place the median over the tokens. */
  norms: Float32Array;
  longest: number;
  medians: Float32Array;
  layer: number;
  flow: Map<string, Tensor>;
}

const FLOW_COLUMNS = 96;
const FLOW_ROWS = 128;
const ATLAS_AT_ONCE = 128; // tokens up to which all layers of the atlas come in one answer

/** A pass as it is first drawn, in one answer: one layer, all norms, the last row of logits. */
export async function look(
  asked: Omit<RunRequest, "slices" | "model">,
  card: ModelCard,
  at: number,
  head: number,
  view: View,
): Promise<Shown> {
  const layer = Math.min(at, card.sizes.N - 1);
  const { manifest, tensors } = await api.run({ model: card.name, ...asked, slices: slicesOf(card, layer, head, view) });
  const flow = new Map(tensors.map((tensor) => [tensor.point, tensor]));
  const taken = (name: string): Tensor | undefined => {
    const tensor = flow.get(name);
    flow.delete(name);
    return tensor;
  };
  const lengths = taken("norms")!;
  const medians = taken("medians")!.f32!;
  const logits = taken("logits")?.f32 ?? null;
  const order = logits ? ranked(logits) : new Int32Array(0);
  return { manifest, card, logits, order, norms: lengths.f32!, longest: lengths.largest, medians, layer, flow };
}

/** Every point of a layer and the ends of the stream, pooled to what the flow has room for. */
export async function flowOf(
  run: string,
  card: ModelCard,
  layer: number,
  head: number,
  view: View,
  signal?: AbortSignal,
): Promise<Map<string, Tensor>> {
  const found = await api.tensors(run, slicesOf(card, layer, head, view), signal);
  return new Map(found.map((tensor) => [tensor.point, tensor]));
}

function slicesOf(card: ModelCard, layer: number, chosen: number, view: View): SliceRequest[] {
  const kind = layerKind(card, layer);
  const head = Math.min(chosen, kind.sizes.H - 1);
  const added = pointCard(card, "embed.positions") ? ["embed.tokens", "embed.positions"] : [];
  const outside = [...added, "embed.out", "final.norm"].filter((name) => pointCard(card, name));
  const slices = outside.map((point) => ({ point, most_rows: FLOW_ROWS, most_columns: FLOW_COLUMNS }) as SliceRequest);
  for (const point of kind.points) {
    if (point.name === "moe.expert_out") continue;
    const own = point.name === "attn.head_out"; // worked out only where one head's steps are drawn
    if (own && view !== "heads") continue;
    if (["moe.chosen", "moe.gates"].includes(point.name)) {
      slices.push({ point: `layers.${layer}.${point.name}`, format: "f32" }); // who goes where, to the token
      continue;
    }
    const square = point.symbols.at(-1) === "S";
    slices.push({
      point: `layers.${layer}.${point.name}`,
      ...(square || own ? { head } : {}), // of these only the chosen head is drawn
      most_rows: FLOW_ROWS,
      most_columns: square ? FLOW_ROWS : FLOW_COLUMNS,
    });
  }
  return slices;
}

/** All heads of a pass, whole; of a long one the layers that have come so far, time and again. */
export async function* atlasOf(shown: Shown): AsyncGenerator<Atlas> {
  const { run, tokens } = shown.manifest;
  const layers = shown.card.sizes.N;
  const atlas = emptyAtlas(run, layers, Math.max(...shown.card.layers.map((kind) => kind.sizes.H)));
  const step = tokens.length <= ATLAS_AT_ONCE ? layers : 1;
  for (let first = 0; first < layers; first += step) {
    const { header, bytes } = await api.atlas(run, first, Math.min(layers, first + step));
    receive(atlas, header, bytes);
    yield { ...atlas };
  }
}
