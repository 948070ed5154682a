// The changed text: from the URL or from an example with the same clean text; a suggestion of the server if there is none; its tokens.
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
  cleanText = $derived(this.isSource ? session.source : session.text);
  #example = $derived(session.modelInfo?.examples.find(({ fragment }) => fragment.screen === "compare" && fragment.text === session.text && (fragment.source ?? "") === (this.isSource ? session.source : "")));
  #suggestion = $state.raw<{ text: string; changed: string | null }>();
  /** The changed text; empty if there is none. */
  text = $derived(urlState.get("changed") ?? this.#example?.fragment.changed ?? "");
  /** A plausible changed text of the clean text; undefined if there is none or it is not known. */
  suggestion = $derived(this.#suggestion?.text === this.cleanText ? (this.#suggestion.changed ?? undefined) : undefined);
  problem = $state("");
  tokenStrs = $state.raw<string[]>([]);
  #tokenized = $state.raw<{ text: string; tokens: number[] }>();
  /** Input of the model with the changed text; undefined while it is tokenized. */
  modelInput = $derived.by<ModelInput | undefined>(() => {
    const [input, tokenized] = [session.modelInput, this.#tokenized];
    if (!input || !tokenized || tokenized.text !== this.text) return undefined;
    return this.isSource ? { ...input, source: tokenized.tokens } : { ...input, tokens: tokenized.tokens };
  });

  /** Request a suggestion if there is no changed text. For $effect. */
  suggest(): (() => void) | undefined {
    const [input, text, position] = [session.modelInput, this.cleanText, session.position];
    if (!input || this.text || position < 0) return undefined;
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
    if (!text) {
      [this.#tokenized, this.tokenStrs, this.problem] = [undefined, [], ""];
      return undefined;
    }
    const controller = new AbortController();
    runQuery<Tokenized>("tokenize", { text, field: this.isSource ? "source" : "text" }, { signal: controller.signal })
      .then(({ data }) => ([this.#tokenized, this.tokenStrs, this.problem] = [{ text, tokens: data.tokens }, data.token_strs, ""]))
      .catch((error: Error) => {
        if (!controller.signal.aborted) [this.#tokenized, this.tokenStrs, this.problem] = [undefined, [], error.message];
      });
    return () => controller.abort();
  }
}
