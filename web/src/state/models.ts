/** Models as the server has them: what each is, asked for once; and how loading goes on. */
import { api } from "../api";
import type { ModelCard, ModelEntry } from "../protocol";

export class Cards {
  #held = new Map<string, Promise<ModelCard>>();

  /** The card of a model; the answer comes when the model has been loaded. */
  of(name: string): Promise<ModelCard> {
    let card = this.#held.get(name);
    if (!card) {
      card = api.card(name);
      card.catch(() => this.#held.delete(name));
      this.#held.set(name, card);
    }
    return card;
  }
}

/** Tell how it stands with the models, time and again, until the function that is returned is called. */
export function watchModels(tell: (models: ModelEntry[]) => void): () => void {
  const timer = setInterval(() => {
    void api.models().then(
      (listed) => tell(listed.models),
      () => undefined,
    );
  }, 700);
  return () => clearInterval(timer);
}
