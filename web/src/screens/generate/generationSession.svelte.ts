// A text that grows: tokens are asked for a few ahead of those that are shown, and kept until the text or a setting changes.
import { runQuery } from "../../lib/queryClient";
import type { ModelInput } from "../../lib/session.svelte";

export interface TokenProbability {
  token: number;
  text: string;
  probability: number;
  sampling_probability: number;
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
  latency_ms: number;
  cache: CacheState;
  finish_reason: string | null;
  /** Put there by hand. */
  forced?: boolean;
}

export interface CacheCheck {
  max_abs_diff: number;
  max_abs_logit: number;
  /** The most that they may differ by; 16-bit numbers have no such bound. */
  tolerance: number | null;
  num_compared: number;
}

export interface GenerationParams {
  modelInput: ModelInput;
  /** How many of the input's tokens the model did not write. */
  num_prompt_tokens: number;
  max_new_tokens: number;
  temperature: number;
  top_k: number | null;
  top_p: number | null;
  seed: number;
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
  #stop = new AbortController();

  /** What another one wrote that differs in nothing but what was put there by hand is taken over up to there. */
  constructor(readonly params: GenerationParams, before?: GenerationSession) {
    if (!before || paramsKey(before.params) !== paramsKey(params)) return;
    const [mine, its] = [params.forced, before.params.forced];
    const all = Object.keys({ ...mine, ...its }).map(Number);
    const first = Math.min(...all.filter((at) => mine[at] !== its[at]), Infinity);
    this.steps = before.steps.slice(0, first);
    const turned = before.steps[first];
    if (turned && mine[first] !== undefined) this.#appendStep(turned);
  }

  get finishReason(): string | null {
    return this.steps[this.steps.length - 1]?.finish_reason ?? null;
  }

  /** See to it that there are tokens behind those that are shown. */
  ensureSteps(shown: number): void {
    const { forced, max_new_tokens } = this.params;
    if (this.busy || this.finishReason || this.problem || this.#stop.signal.aborted) return;
    if (this.steps.length >= Math.min(max_new_tokens, shown + PREFETCH)) return;
    const known = this.steps.length;
    const next = Math.min(...Object.keys(forced).map(Number).filter((at) => at >= known), Infinity);
    void this.#fetchSteps(Math.min(MAX_BATCH, max_new_tokens - known, next - known + 1));
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
      const before = this.steps.length;
      const { data, tensors } = await runQuery<{ cache_check: CacheCheck | null }>("generate", query, {
        signal: this.#stop.signal,
        onPartial: (result) => this.#appendStep((result.data as unknown as { step: SamplingStep }).step),
      });
      if (data.cache_check) this.#mergeCheck(data.cache_check, before, Array.from(tensors.max_abs_diff?.data ?? []));
    } catch (error) {
      if (!this.#stop.signal.aborted) this.problem = (error as Error).message;
    } finally {
      this.busy = false;
    }
  }

  #appendStep(step: SamplingStep): void {
    const other = this.params.forced[this.steps.length];
    const rank = step.top_tokens.findIndex((each) => each.token === other);
    const instead = step.top_tokens[rank];
    const taken = instead && other !== step.token ? { ...step, token: instead.token, token_str: instead.text, probability: instead.probability, sampling_probability: instead.sampling_probability, rank: rank + 1, finish_reason: null, forced: true } : step;
    this.steps = [...this.steps, taken];
  }

  #mergeCheck(check: CacheCheck, from: number, maxAbsDiffs: number[]): void {
    const before = this.check;
    const all = [...this.maxAbsDiffs];
    maxAbsDiffs.forEach((value, at) => (all[from + at] = value));
    this.maxAbsDiffs = all;
    this.check = {
      max_abs_diff: Math.max(check.max_abs_diff, before?.max_abs_diff ?? 0),
      max_abs_logit: Math.max(check.max_abs_logit, before?.max_abs_logit ?? 0),
      tolerance: check.tolerance === null ? null : Math.max(check.tolerance, before?.tolerance ?? 0),
      num_compared: check.num_compared + (before?.num_compared ?? 0),
    };
  }

  close(): void {
    this.#stop.abort();
  }
}

const paramsKey = ({ forced: _, ...rest }: GenerationParams): string => JSON.stringify(rest);

export const parseForcedTokens = (text: string | undefined): Record<number, number> =>
  Object.fromEntries((text ?? "").split(",").map((pair) => pair.split(":").map(Number)).filter((pair): pair is [number, number] => pair.length === 2 && pair.every((each) => Number.isInteger(each) && each >= 0)));

export const formatForcedTokens = (forced: Record<number, number>): string | null => Object.entries(forced).map(([at, token]) => `${at}:${token}`).join(",") || null;

export const formatBytes = (count: number): string => (count >= 1 << 20 ? `${(count / (1 << 20)).toFixed(2)} MiB` : count >= 1024 ? `${(count / 1024).toFixed(1)} KiB` : `${Math.round(count)} B`);
