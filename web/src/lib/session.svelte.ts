// State shared by all screens: the loaded model and the tokenized text.
import { runQuery, setModelGeneration, ConnectionError } from "./queryClient";
import { parseEdits, type Edits } from "./edits";
import { exportedPage } from "./exportTransport";
import { urlState, type Screen } from "./urlState.svelte";

export interface Layer {
  heads: number;
  kv_heads: number;
  window: number | null;
}

export interface ModelInfo {
  name: string;
  /** Number of models opened by the server before this one. */
  generation: number;
  /** Name, method and size of the LoRA adapter that is applied; null without one. */
  adapter: string | null;
  form: "decoder" | "encoder" | "encoder-decoder";
  num_parameters: number;
  dtype: string;
  d_model: number;
  vocab_size: number;
  context: number | null;
  stacks: Record<string, Layer[]>;
  /** Sites, and the position values that the model has, such as `embed.position`. */
  sites: string[];
  structural_edits: Record<string, string[]>;
  has_head: boolean;
  /** Whether the output matrix is the token embedding. */
  is_tied: boolean;
  /** Why direct logit attribution does not apply to this model; null if it applies. */
  attribution_error: string | null;
  is_untrained: boolean;
  is_run_directory: boolean;
  max_tokens: number;
  default_text: string;
  default_source: string | null;
  /** Token selected for the default input; null: the last one. */
  default_position: number | null;
  /** Mask token of an encoder; null for other models. */
  mask_token_id: number | null;
  examples: Example[];
}

/** An input of a pretrained model that shows one of its mechanisms. `fragment` has the screen and the URL parameters. */
export interface Example {
  title: string;
  about: string;
  fragment: { screen: Screen } & Record<string, string>;
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
  /** Model name without its directory. */
  modelName = $derived(this.modelInfo?.name.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? "");
  /** Text of the URL fragment; default: the model's default text. */
  text = $derived((exportedPage() ? undefined : urlState.get("text")) ?? this.modelInfo?.default_text ?? "");
  source = $derived((exportedPage() ? undefined : urlState.get("source")) ?? this.modelInfo?.default_source ?? "");
  tokenStrs = $state.raw<string[]>([]);
  sourceTokenStrs = $state.raw<string[]>([]);
  #tokenized = $state.raw<ModelInput>();
  /** Active edits. They are empty on the edit screen, which compares with the unedited model and passes the edits itself, on the compare screen, which compares texts on the unedited model, and in an exported page, which has results of edits on that screen only. */
  edits = $derived(urlState.screen === "edit" || urlState.screen === "compare" || exportedPage() || !this.modelInfo ? {} : parseEdits(urlState.get("edits")));
  modelInput = $derived(this.#withEdits(this.#tokenized, this.edits));
  #edited: { tokenized: ModelInput; key: string; input: ModelInput } | undefined;
  problem = $state<string>();
  /** Whether another model is being opened. No screen is shown then, so that no query is sent about either model. */
  isOpeningModel = $state(false);
  #requests = 0;

  /** Prefix of the site names of the stack that computes the logits. */
  sitePrefix = $derived(this.modelInfo?.form === "encoder-decoder" ? "decoder." : "");
  outputStack = $derived(this.modelInfo?.form === "encoder" ? "encoder" : "decoder");
  /** Index of the selected token; default: the first mask of an encoder, the default position of the default input, or the last token. */
  position = $derived(this.#findPosition());
  sourcePosition = $derived(clampIndex(urlState.number("source_position"), this.sourceTokenStrs));

  /** The input with the active edits: the same object for equal edits, because a new one would start all queries again. */
  #withEdits(tokenized: ModelInput | undefined, edits: Edits): ModelInput | undefined {
    const key = JSON.stringify(edits);
    if (!tokenized || key === "{}") return tokenized;
    if (this.#edited?.tokenized !== tokenized || this.#edited.key !== key) this.#edited = { tokenized, key, input: { ...tokenized, edits } };
    return this.#edited.input;
  }

  #findPosition(): number {
    const position = clampIndex(urlState.number("position") ?? this.#defaultPosition(), this.tokenStrs);
    const exported = exportedPage();
    if (!exported || position < 0) return position;
    return urlState.screen === "edit" ? exported.edit_position : Math.max(position, exported.positions[0] ?? 0);
  }

  #defaultPosition(): number | undefined {
    const info = this.modelInfo;
    if (!info) return undefined;
    if (info.mask_token_id !== null) {
      const index = this.#tokenized?.tokens.indexOf(info.mask_token_id) ?? -1;
      return index < 0 ? undefined : index;
    }
    const isDefault = this.text === info.default_text && this.source === (info.default_source ?? "");
    return isDefault ? (info.default_position ?? undefined) : undefined;
  }

  async open(): Promise<void> {
    this.modelInfo = (await runQuery<ModelInfo>("model_info", {})).data;
    setModelGeneration(this.modelInfo.generation);
  }

  /** Open another model of `list_models` with its default text. */
  async openModel(id: string): Promise<void> {
    this.isOpeningModel = true;
    try {
      const { data } = await runQuery<{ generation: number }>("open_model", { id });
      setModelGeneration(data.generation);
      const { data: modelInfo } = await runQuery<ModelInfo>("model_info", {});
      this.#requests += 1; // drop the result of a running request
      [this.tokenStrs, this.sourceTokenStrs, this.#tokenized, this.problem] = [[], [], undefined, undefined];
      urlState.clear();
      this.modelInfo = modelInfo;
    } finally {
      this.isOpeningModel = false;
    }
  }

  /** Tokenize both texts; results of outdated requests are dropped. */
  async tokenizeTexts(text: string, source: string): Promise<void> {
    const request = ++this.#requests;
    try {
      const isEncoderDecoder = this.modelInfo?.form === "encoder-decoder";
      const [targetResult, sourceResult] = await Promise.all([
        runQuery<Tokenized>("tokenize", { text, field: "text" }),
        isEncoderDecoder ? runQuery<Tokenized>("tokenize", { text: source, field: "source" }) : undefined,
      ]);
      if (request !== this.#requests) return;
      this.tokenStrs = targetResult.data.token_strs;
      this.sourceTokenStrs = sourceResult?.data.token_strs ?? [];
      this.#tokenized = { tokens: targetResult.data.tokens, ...(sourceResult ? { source: sourceResult.data.tokens } : {}) };
      this.problem = undefined;
    } catch (error) {
      if (request !== this.#requests) return;
      this.problem = (error as Error).message;
      if (error instanceof ConnectionError) return;
      [this.tokenStrs, this.sourceTokenStrs, this.#tokenized] = [[], [], undefined]; // figures of the previous text must not be shown for this one
    }
  }
}

/** Clamp an index from the URL to the tokens; default: the last token. */
function clampIndex(index: number | undefined, tokens: readonly string[]): number {
  return Math.min(Math.max(0, Math.trunc(index ?? Infinity)), tokens.length - 1);
}

export const session = new Session();
