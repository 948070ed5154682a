// A generation: steps are fetched ahead of those shown and kept until the input or a sampling parameter changes.
import { runQuery } from "../../lib/queryClient";
import type { ModelInput } from "../../lib/session.svelte";

export interface TokenProbability {
  token: number;
  text: string;
  probability: number;
  sampling_probability: number;
  /** Whether the regular expression allows the token; true without one. */
  allowed: boolean;
}

/** The tokens that the regular expression allows in one step. */
export interface GrammarStats {
  num_allowed: number;
  vocab_size: number;
  /** Total model probability of the allowed tokens. */
  probability: number;
  /** The most likely allowed tokens. */
  top_tokens: TokenProbability[];
}

export interface CacheState {
  length: number;
  slots: number[];
  num_filled: number[];
  bytes: number[];
  source_bytes: number;
  slot_positions: Record<string, number[]>;
}

export interface SamplingStep {
  token: number;
  token_str: string;
  text: string;
  probability: number;
  sampling_probability: number;
  rank: number;
  entropy: number;
  num_candidates: number;
  top_tokens: TokenProbability[];
  grammar: GrammarStats | null;
  latency_ms: number;
  cache: CacheState;
  finish_reason: string | null;
  /** Selected by the user instead of sampled. */
  forced?: boolean;
}

export interface CacheCheck {
  max_abs_diff: number;
  max_abs_logit: number;
  /** Maximum allowed difference; null for 16-bit dtypes, for which none is defined. */
  tolerance: number | null;
  num_compared: number;
}

export interface GenerationParams {
  modelInput: ModelInput;
  /** Number of input tokens that are the prompt; the rest was generated. */
  num_prompt_tokens: number;
  max_new_tokens: number;
  temperature: number;
  top_k: number | null;
  top_p: number | null;
  seed: number;
  regex: string | null;
  forced: Record<number, number>;
}

const PREFETCH = 8;
const MAX_BATCH = 48;

export class GenerationSession {
  steps = $state.raw<SamplingStep[]>([]);
  check = $state.raw<CacheCheck>();
  maxAbsDiffs = $state.raw<number[]>([]);
  problem = $state("");
  busy = $state(false);
  #controller = new AbortController();

  /** Reuse the steps of a previous session with equal parameters, up to the first forced token that differs. */
  constructor(readonly params: GenerationParams, previous?: GenerationSession) {
    if (!previous || paramsKey(previous.params) !== paramsKey(params)) return;
    const [forced, previousForced] = [params.forced, previous.params.forced];
    const indices = Object.keys({ ...forced, ...previousForced }).map(Number);
    const first = Math.min(...indices.filter((index) => forced[index] !== previousForced[index]), Infinity);
    this.steps = previous.steps.slice(0, first);
    const changed = previous.steps[first];
    if (changed && forced[first] !== undefined) this.#appendStep(changed);
  }

  get finishReason(): string | null {
    return this.steps[this.steps.length - 1]?.finish_reason ?? null;
  }

  /** Fetch steps so that PREFETCH of them follow the shown ones. */
  ensureSteps(numShown: number): void {
    const { forced, max_new_tokens } = this.params;
    if (this.busy || this.finishReason || this.problem || this.#controller.signal.aborted) return;
    if (this.steps.length >= Math.min(max_new_tokens, numShown + PREFETCH)) return;
    const numFetched = this.steps.length;
    const nextForced = Math.min(...Object.keys(forced).map(Number).filter((index) => index >= numFetched), Infinity);
    void this.#fetchSteps(Math.min(MAX_BATCH, max_new_tokens - numFetched, nextForced - numFetched + 1));
  }

  async #fetchSteps(numTokens: number): Promise<void> {
    const { forced, modelInput, num_prompt_tokens, max_new_tokens, ...sampling } = this.params;
    this.busy = true;
    try {
      const tokens = [...modelInput.tokens, ...this.steps.map((step) => step.token)];
      const query = {
        ...sampling,
        input: { ...modelInput, tokens },
        num_prompt_tokens,
        max_new_tokens: max_new_tokens + modelInput.tokens.length - num_prompt_tokens,
        num_tokens: numTokens,
      };
      const numBefore = this.steps.length;
      const { data, tensors } = await runQuery<{ cache_check: CacheCheck | null }>("generate", query, {
        signal: this.#controller.signal,
        onPartial: (result) => this.#appendStep((result.data as unknown as { step: SamplingStep }).step),
      });
      if (data.cache_check) this.#mergeCheck(data.cache_check, numBefore, Array.from(tensors.max_abs_diff?.data ?? []));
    } catch (error) {
      if (!this.#controller.signal.aborted) this.problem = (error as Error).message;
    } finally {
      this.busy = false;
    }
  }

  #appendStep(step: SamplingStep): void {
    const forcedToken = this.params.forced[this.steps.length];
    const rank = step.top_tokens.findIndex(({ token }) => token === forcedToken);
    const forced = step.top_tokens[rank] ?? step.grammar?.top_tokens.find(({ token }) => token === forcedToken);
    const newStep = forced && forcedToken !== step.token ? { ...step, token: forced.token, token_str: forced.text, probability: forced.probability, sampling_probability: forced.sampling_probability, rank: rank >= 0 ? rank + 1 : step.rank, finish_reason: null, forced: true } : step;
    this.steps = [...this.steps, newStep];
  }

  #mergeCheck(check: CacheCheck, from: number, maxAbsDiffs: number[]): void {
    const previous = this.check;
    const merged = [...this.maxAbsDiffs];
    maxAbsDiffs.forEach((value, index) => (merged[from + index] = value));
    this.maxAbsDiffs = merged;
    this.check = {
      max_abs_diff: Math.max(check.max_abs_diff, previous?.max_abs_diff ?? 0),
      max_abs_logit: Math.max(check.max_abs_logit, previous?.max_abs_logit ?? 0),
      tolerance: check.tolerance === null ? null : Math.max(check.tolerance, previous?.tolerance ?? 0),
      num_compared: check.num_compared + (previous?.num_compared ?? 0),
    };
  }

  close(): void {
    this.#controller.abort();
  }
}

const paramsKey = ({ forced: _, ...rest }: GenerationParams): string => JSON.stringify(rest);

export const parseForcedTokens = (text: string | undefined): Record<number, number> =>
  Object.fromEntries((text ?? "").split(",").map((pair) => pair.split(":").map(Number)).filter((pair): pair is [number, number] => pair.length === 2 && pair.every((value) => Number.isInteger(value) && value >= 0)));

export const formatForcedTokens = (forced: Record<number, number>): string | null => Object.entries(forced).map(([index, token]) => `${index}:${token}`).join(",") || null;

export const formatBytes = (count: number): string => (count >= 1 << 20 ? `${(count / (1 << 20)).toFixed(2)} MiB` : count >= 1024 ? `${(count / 1024).toFixed(1)} KiB` : `${Math.round(count)} B`);
