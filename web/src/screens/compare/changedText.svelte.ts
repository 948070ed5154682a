// The changed text: from the URL, from an example with the same clean text, or a suggestion of the server; and its tokens.
import { runQuery } from "../../lib/queryClient";
import { session, type ModelInput } from "../../lib/session.svelte";
import { urlState } from "../../lib/urlState.svelte";

interface Tokenized {
  tokens: number[];
  token_strs: string[];
}

export class ChangedText {
  /** Whether the source of an encoder-decoder is changed. */
  isSource = $derived(session.modelInfo?.form === "encoder-decoder");
  #cleanText = $derived(this.isSource ? session.source : session.text);
  #example = $derived(session.modelInfo?.examples.find(({ fragment }) => fragment.screen === "compare" && fragment.text === session.text && (fragment.source ?? "") === (this.isSource ? session.source : "")));
  #suggestion = $state.raw<{ text: string; changed: string | null }>();
  /** The changed text; undefined until a suggestion is known. */
  text = $derived(urlState.get("changed") ?? this.#example?.fragment.changed ?? (this.#suggestion?.text === this.#cleanText ? (this.#suggestion.changed ?? this.#cleanText) : undefined));
  problem = $state("");
  tokenStrs = $state.raw<string[]>([]);
  #tokenized = $state.raw<{ text: string; tokens: number[] }>();
  /** Input of the model with the changed text; undefined while it is tokenized. */
  modelInput = $derived.by<ModelInput | undefined>(() => {
    const [input, tokenized] = [session.modelInput, this.#tokenized];
    if (!input || !tokenized || tokenized.text !== this.text) return undefined;
    return this.isSource ? { ...input, source: tokenized.tokens } : { ...input, tokens: tokenized.tokens };
  });

  /** Request a suggestion if no text is known. For $effect. */
  suggest(): (() => void) | undefined {
    const [input, text, position] = [session.modelInput, this.#cleanText, session.position];
    if (!input || this.text !== undefined || position < 0) return undefined;
    const controller = new AbortController();
    runQuery<{ changed: string | null }>("suggest_changed_text", { input, text, position }, { signal: controller.signal })
      .then(({ data }) => (this.#suggestion = { text, changed: data.changed }))
      .catch((error: Error) => {
        if (!controller.signal.aborted) this.problem = error.message;
      });
    return () => controller.abort();
  }

  /** Tokenize the text. For $effect. */
  tokenize(): (() => void) | undefined {
    const text = this.text;
    if (text === undefined) return undefined;
    const controller = new AbortController();
    runQuery<Tokenized>("tokenize", { text, field: this.isSource ? "source" : "text" }, { signal: controller.signal })
      .then(({ data }) => ([this.#tokenized, this.tokenStrs, this.problem] = [{ text, tokens: data.tokens }, data.token_strs, ""]))
      .catch((error: Error) => {
        if (!controller.signal.aborted) [this.#tokenized, this.tokenStrs, this.problem] = [undefined, [], error.message];
      });
    return () => controller.abort();
  }
}
