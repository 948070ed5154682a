// The model that is looked into, and the text it reads: what every screen shares.
import { ask, Unanswered } from "./ask";
import { read } from "./edits";
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
  /** The model's name without the folders it lies in. */
  called = $derived(this.about?.name.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? "");
  /** What stands in the address, or what the model is opened with. */
  text = $derived(place.get("text") ?? this.about?.text ?? "");
  source = $derived(place.get("source") ?? this.about?.source ?? "");
  words = $state.raw<string[]>([]);
  sourceWords = $state.raw<string[]>([]);
  #read = $state.raw<Look>();
  /** What is changed in the model while it reads. Break it compares with the model as it is, so there it is no part of the look. */
  edits = $derived(place.screen === "break" || !this.about ? {} : read(place.get("edits")));
  look = $derived(this.#read && Object.keys(this.edits).length ? { ...this.#read, edits: this.edits } : this.#read);
  problem = $state<string>();
  #turn = 0;

  /** The stack that writes the answer, as a site's name begins. */
  prefix = $derived(this.about?.form === "encoder-decoder" ? "decoder." : "");
  writer = $derived(this.about?.form === "encoder" ? "encoder" : "decoder");
  /** The token that is followed; the last one, unless another was chosen. */
  at = $derived(within(place.number("at"), this.words));
  sourceAt = $derived(within(place.number("source_at"), this.sourceWords));

  async open(): Promise<void> {
    this.about = (await ask<About>("about", {})).facts;
  }

  /** Turn the texts into tokens; the latest wins. */
  async readTexts(text: string, source: string): Promise<void> {
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
      this.#read = { tokens: mine.facts.tokens, ...(other ? { source: other.facts.tokens } : {}) };
      this.problem = undefined;
    } catch (error) {
      if (turn !== this.#turn) return;
      this.problem = (error as Error).message;
      if (error instanceof Unanswered) return;
      [this.words, this.sourceWords, this.#read] = [[], [], undefined]; // a picture of another text would look like this one's
    }
  }
}

/** A place among the words, whatever the address says; the last one, unless it says any. */
function within(place: number | undefined, words: readonly string[]): number {
  return Math.min(Math.max(0, Math.trunc(place ?? Infinity)), words.length - 1);
}

export const session = new Session();
