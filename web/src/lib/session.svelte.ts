// The model that is looked into, and the text it reads: what every screen shares.
import { runQuery, ConnectionError } from "./queryClient";
import { parseEdits } from "./edits";
import { urlState } from "./urlState.svelte";

export interface Layer {
  heads: number;
  kv_heads: number;
  window: number | null;
}

export interface ModelInfo {
  name: string;
  form: "decoder" | "encoder" | "encoder-decoder";
  num_parameters: number;
  dtype: string;
  d_model: number;
  vocab_size: number;
  context: number | null;
  stacks: Record<string, Layer[]>;
  sites: string[];
  structural_edits: Record<string, string[]>;
  has_head: boolean;
  is_untrained: boolean;
  is_run_directory: boolean;
  max_tokens: number;
  default_text: string;
  default_source: string | null;
}

export interface ModelInput {
  tokens: number[];
  source?: number[];
  edits?: Record<string, unknown>;
}

interface Tokenized {
  tokens: number[];
  token_strs: string[];
}

class Session {
  modelInfo = $state<ModelInfo>();
  /** The model's name without the folders it lies in. */
  modelName = $derived(this.modelInfo?.name.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? "");
  /** What stands in the address, or what the model is opened with. */
  text = $derived(urlState.get("text") ?? this.modelInfo?.default_text ?? "");
  source = $derived(urlState.get("source") ?? this.modelInfo?.default_source ?? "");
  tokenStrs = $state.raw<string[]>([]);
  sourceTokenStrs = $state.raw<string[]>([]);
  #tokenized = $state.raw<ModelInput>();
  /** What is changed in the model while it reads. The edit screen compares with the model as it is, so there it is no part of the input. */
  edits = $derived(urlState.screen === "edit" || !this.modelInfo ? {} : parseEdits(urlState.get("edits")));
  modelInput = $derived(this.#tokenized && Object.keys(this.edits).length ? { ...this.#tokenized, edits: this.edits } : this.#tokenized);
  problem = $state<string>();
  #requests = 0;

  /** The stack that writes the answer, as a site's name begins. */
  sitePrefix = $derived(this.modelInfo?.form === "encoder-decoder" ? "decoder." : "");
  outputStack = $derived(this.modelInfo?.form === "encoder" ? "encoder" : "decoder");
  /** The token that is followed; the last one, unless another was chosen. */
  position = $derived(clampIndex(urlState.number("position"), this.tokenStrs));
  sourcePosition = $derived(clampIndex(urlState.number("source_position"), this.sourceTokenStrs));

  async open(): Promise<void> {
    this.modelInfo = (await runQuery<ModelInfo>("model_info", {})).data;
  }

  /** Turn the texts into tokens; the latest wins. */
  async tokenizeTexts(text: string, source: string): Promise<void> {
    const request = ++this.#requests;
    try {
      const two = this.modelInfo?.form === "encoder-decoder";
      const [mine, other] = await Promise.all([
        runQuery<Tokenized>("tokenize", { text, field: "text" }),
        two ? runQuery<Tokenized>("tokenize", { text: source, field: "source" }) : undefined,
      ]);
      if (request !== this.#requests) return;
      this.tokenStrs = mine.data.token_strs;
      this.sourceTokenStrs = other?.data.token_strs ?? [];
      this.#tokenized = { tokens: mine.data.tokens, ...(other ? { source: other.data.tokens } : {}) };
      this.problem = undefined;
    } catch (error) {
      if (request !== this.#requests) return;
      this.problem = (error as Error).message;
      if (error instanceof ConnectionError) return;
      [this.tokenStrs, this.sourceTokenStrs, this.#tokenized] = [[], [], undefined]; // a picture of another text would look like this one's
    }
  }
}

/** An index among the tokens, whatever the address says; the last one, unless it says any. */
function clampIndex(index: number | undefined, tokens: readonly string[]): number {
  return Math.min(Math.max(0, Math.trunc(index ?? Infinity)), tokens.length - 1);
}

export const session = new Session();
