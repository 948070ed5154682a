// The model that is looked into, and the text it reads: what every screen shares.
import { ask } from "./ask";
import { place } from "./place.svelte";

export interface Layer {
  heads: number;
  kv_heads: number;
  window: number | null;
}

export interface About {
  name: string;
  form: "decoder" | "encoder" | "encoder-decoder";
  parameters: number;
  dtype: string;
  d_model: number;
  vocab_size: number;
  context: number | null;
  stacks: Record<string, Layer[]>;
  sites: string[];
  builds: Record<string, string[]>;
  has_head: boolean;
  fresh: boolean;
  is_run: boolean;
  most_tokens: number;
  text: string;
  source: string | null;
}

export interface Look {
  tokens: number[];
  source?: number[];
  edits?: Record<string, unknown>;
}

interface Read {
  tokens: number[];
  words: string[];
}

class Session {
  about = $state<About>();
  /** What stands in the address, or what the model is opened with. */
  text = $derived(place.get("text") ?? this.about?.text ?? "");
  source = $derived(place.get("source") ?? this.about?.source ?? "");
  words = $state.raw<string[]>([]);
  sourceWords = $state.raw<string[]>([]);
  look = $state.raw<Look>();
  problem = $state<string>();
  #turn = 0;

  /** The stack that writes the answer, as a site's name begins. */
  prefix = $derived(this.about?.form === "encoder-decoder" ? "decoder." : "");
  writer = $derived(this.about?.form === "encoder" ? "encoder" : "decoder");
  /** The token that is followed; the last one, unless another was chosen. */
  at = $derived(Math.min(place.number("at") ?? Infinity, this.words.length - 1));
  sourceAt = $derived(Math.min(place.number("source_at") ?? Infinity, this.sourceWords.length - 1));

  async open(): Promise<void> {
    this.about = (await ask<About>("about", {})).facts;
  }

  /** Turn the texts into tokens; the latest wins. */
  async read(text: string, source: string): Promise<void> {
    const turn = ++this.#turn;
    try {
      const two = this.about?.form === "encoder-decoder";
      const [mine, other] = await Promise.all([
        ask<Read>("tokens", { text, side: "text" }),
        two ? ask<Read>("tokens", { text: source, side: "source" }) : undefined,
      ]);
      if (turn !== this.#turn) return;
      this.words = mine.facts.words;
      this.sourceWords = other?.facts.words ?? [];
      this.look = { tokens: mine.facts.tokens, ...(other ? { source: other.facts.tokens } : {}) };
      this.problem = undefined;
    } catch (error) {
      if (turn === this.#turn) this.problem = (error as Error).message;
    }
  }
}

export const session = new Session();
