/** Speaking with the server. Every failure becomes a `Refused` with a sentence that can be shown. */
import type {
  AtlasHeader,
  Cell,
  Continuation,
  Failure,
  Lineage,
  Manifest,
  ModelCard,
  ModelEntry,
  NextTokenCard,
  TensorHeader,
} from "./protocol";

export class Refused extends Error {
  constructor(
    sentence: string,
    readonly kind: Failure["kind"] | "offline",
  ) {
    super(sentence);
  }
}

export interface Tensor extends TensorHeader {
  u8: Uint8Array | null;
  f32: Float32Array | null;
}

export interface SliceRequest {
  point: string;
  head?: number;
  rows?: [number, number];
  columns?: [number, number];
  most_rows?: number;
  most_columns?: number;
  format?: "u8" | "f32";
}

export interface RunRequest {
  model: string;
  prompt?: string;
  ids?: number[];
  edits?: Edit[];
  /** The run that the page showed before: what the two share is not computed again. */
  after?: string;
  slices: SliceRequest[];
}

export type Edit = Record<string, unknown>;

async function ask(path: string, init?: RequestInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(path, init);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is `cutaway serve` still running?", "offline");
  }
  if (answer.ok) return answer;
  let failure: Failure = { error: `The server answered ${answer.status}.`, kind: "refused" };
  try {
    failure = (await answer.json()) as Failure;
  } catch {
    // An answer that is no JSON keeps the sentence above.
  }
  throw new Refused(failure.error, failure.kind);
}

async function json<T>(path: string, init?: RequestInit): Promise<T> {
  return (await (await ask(path, init)).json()) as T;
}

function post(body: unknown, signal?: AbortSignal): RequestInit {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

const query = (values: Record<string, string | number>) =>
  new URLSearchParams(Object.entries(values).map(([k, v]) => [k, String(v)])).toString();

export const api = {
  models: () => json<{ models: ModelEntry[]; default: string }>("api/models"),
  card: (model: string) => json<ModelCard>(`api/card?${query({ model })}`),
  /** The prompt is for the line of Python alone; an address has no room for a long one. */
  lineage: (model: string, point: string, prompt: string) =>
    json<Lineage>(`api/lineage?${query({ model, point, prompt: prompt.slice(0, 2000) })}`),
  uniforms: (seed: number, count: number) =>
    json<{ uniforms: number[] }>(`api/uniforms?${query({ seed, count })}`).then((a) => a.uniforms),
  /** A run, and in the same answer what is drawn first of it: its lengths, its last logits, and these slices. */
  async run(body: RunRequest): Promise<{ manifest: Manifest; tensors: Tensor[] }> {
    const buffer = await (await ask("api/run", post(body))).arrayBuffer();
    const [manifest, start] = headerAt<Manifest>(buffer, 0);
    return { manifest, tensors: decode(buffer, start) };
  },
  /** Nobody looks at this run any more, nor at those before it. */
  leave: (run: string) => void fetch(`api/runs/${run}`, { method: "DELETE", keepalive: true }).catch(() => undefined),
  goOn: (body: { model: string; ids: number[]; edits?: Edit[]; steps: number; temperature?: number }) =>
    json<Continuation>("api/continue", post(body)),
  cell: (run: string, point: string, at: number[], signal?: AbortSignal) =>
    json<Cell>(`api/runs/${run}/cell?${query({ point, at: at.join(",") })}`, { signal }),
  token: (run: string, id: number) => json<NextTokenCard>(`api/runs/${run}/token?${query({ id })}`),
  exportUrl: (run: string, point: string, format: string) => `api/runs/${run}/export?${query({ point, format })}`,

  async tensors(run: string, slices: SliceRequest[], signal?: AbortSignal): Promise<Tensor[]> {
    const answer = await ask(`api/runs/${run}/tensors`, post({ slices }, signal));
    return decode(await answer.arrayBuffer());
  },

  async atlas(run: string, first: number, stop: number): Promise<{ header: AtlasHeader; bytes: Uint8Array }> {
    const answer = await ask(`api/runs/${run}/atlas?${query({ first, stop })}`);
    const buffer = await answer.arrayBuffer();
    const [header, start] = headerAt<AtlasHeader>(buffer, 0);
    return { header, bytes: new Uint8Array(buffer, start) };
  },

  /** What a token gives (first half) and gets (second half) in a head's pattern. */
  async row(run: string, layer: number, head: number, position: number, signal?: AbortSignal): Promise<Float32Array> {
    const answer = await ask(`api/runs/${run}/row?${query({ layer, head, position })}`, { signal });
    return new Float32Array(await answer.arrayBuffer());
  },
};

function headerAt<T>(buffer: ArrayBuffer, at: number): [T, number] {
  const length = new DataView(buffer).getUint32(at, true);
  const text = new TextDecoder().decode(new Uint8Array(buffer, at + 4, length));
  return [JSON.parse(text) as T, at + 4 + length];
}

/** The tensors of one answer, one after another; their numbers are views of the answer's bytes. */
export function decode(buffer: ArrayBuffer, from = 0): Tensor[] {
  const found: Tensor[] = [];
  let at = from;
  while (at < buffer.byteLength) {
    const [header, start] = headerAt<TensorHeader>(buffer, at);
    const size = header.shape.reduce((a, b) => a * b, 1);
    const bytes = header.format === "f32" ? size * 4 : size;
    found.push({
      ...header,
      u8: header.format === "u8" ? new Uint8Array(buffer, start, size) : null,
      f32: header.format === "f32" ? new Float32Array(buffer, start, size) : null,
    });
    at = start + Math.ceil(bytes / 8) * 8;
  }
  return found;
}
