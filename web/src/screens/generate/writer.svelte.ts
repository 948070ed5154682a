// A text that grows: tokens are asked for a few ahead of those that are shown, and kept until the text or a setting changes.
import { ask } from "../../lib/ask";
import type { Look } from "../../lib/session.svelte";

export interface Likely {
  token: number;
  text: string;
  share: number;
  chance: number;
}

export interface CacheState {
  length: number;
  slots: number[];
  filled: number[];
  bytes: number[];
  source: number;
  held: Record<string, number[]>;
}

export interface Step {
  token: number;
  word: string;
  text: string;
  share: number;
  chance: number;
  rank: number;
  entropy: number;
  left: number;
  top: Likely[];
  ms: number;
  cache: CacheState;
  end: string | null;
  /** Put there by hand. */
  forced?: boolean;
}

export interface Check {
  largest: number;
  of: number;
  rounding: number;
  compared: number;
}

export interface Asked {
  look: Look;
  /** How many of the look's tokens the model did not write. */
  prompt: number;
  most: number;
  temperature: number;
  top_k: number | null;
  top_p: number | null;
  seed: number;
  forced: Record<number, number>;
}

const AHEAD = 8;
const BATCH = 48;

export class Writer {
  steps = $state.raw<Step[]>([]);
  check = $state.raw<Check>();
  apart = $state.raw<number[]>([]);
  problem = $state("");
  busy = $state(false);
  #stop = new AbortController();

  /** What another one wrote that differs in nothing but what was put there by hand is taken over up to there. */
  constructor(readonly asked: Asked, before?: Writer) {
    if (!before || same(before.asked) !== same(asked)) return;
    const [mine, its] = [asked.forced, before.asked.forced];
    const all = Object.keys({ ...mine, ...its }).map(Number);
    const first = Math.min(...all.filter((at) => mine[at] !== its[at]), Infinity);
    this.steps = before.steps.slice(0, first);
    const turned = before.steps[first];
    if (turned && mine[first] !== undefined) this.#take(turned);
  }

  get ended(): string | null {
    return this.steps[this.steps.length - 1]?.end ?? null;
  }

  /** See to it that there are tokens behind those that are shown. */
  need(shown: number): void {
    const { forced, most } = this.asked;
    if (this.busy || this.ended || this.problem || this.#stop.signal.aborted) return;
    if (this.steps.length >= Math.min(most, shown + AHEAD)) return;
    const known = this.steps.length;
    const next = Math.min(...Object.keys(forced).map(Number).filter((at) => at >= known), Infinity);
    void this.#write(Math.min(BATCH, most - known, next - known + 1));
  }

  async #write(count: number): Promise<void> {
    const { forced, look, prompt, most, ...how } = this.asked;
    this.busy = true;
    try {
      const tokens = [...look.tokens, ...this.steps.map((step) => step.token)];
      const given = { ...how, look: { ...look, tokens }, prompt, most: most + look.tokens.length - prompt, count };
      const before = this.steps.length;
      const { facts, arrays } = await ask<{ check: Check | null }>("write", given, {
        signal: this.#stop.signal,
        part: (answer) => this.#take((answer.facts as unknown as { choice: Step }).choice),
      });
      if (facts.check) this.#compare(facts.check, before, Array.from(arrays.apart?.data ?? []));
    } catch (error) {
      if (!this.#stop.signal.aborted) this.problem = (error as Error).message;
    } finally {
      this.busy = false;
    }
  }

  #take(step: Step): void {
    const other = this.asked.forced[this.steps.length];
    const rank = step.top.findIndex((each) => each.token === other);
    const instead = step.top[rank];
    const taken = instead && other !== step.token ? { ...step, token: instead.token, word: instead.text, share: instead.share, chance: instead.chance, rank: rank + 1, end: null, forced: true } : step;
    this.steps = [...this.steps, taken];
  }

  #compare(check: Check, from: number, apart: number[]): void {
    const before = this.check;
    const all = [...this.apart];
    apart.forEach((value, at) => (all[from + at] = value));
    this.apart = all;
    this.check = {
      largest: Math.max(check.largest, before?.largest ?? 0),
      of: Math.max(check.of, before?.of ?? 0),
      rounding: Math.max(check.rounding, before?.rounding ?? 0),
      compared: check.compared + (before?.compared ?? 0),
    };
  }

  close(): void {
    this.#stop.abort();
  }
}

const same = ({ forced: _, ...rest }: Asked): string => JSON.stringify(rest);

export const readForced = (text: string | undefined): Record<number, number> =>
  Object.fromEntries((text ?? "").split(",").map((pair) => pair.split(":").map(Number)).filter((pair): pair is [number, number] => pair.length === 2 && pair.every((each) => Number.isInteger(each) && each >= 0)));

export const writeForced = (forced: Record<number, number>): string | null => Object.entries(forced).map(([at, token]) => `${at}:${token}`).join(",") || null;

export const bytes = (count: number): string => (count >= 1 << 20 ? `${(count / (1 << 20)).toFixed(2)} MiB` : count >= 1024 ? `${(count / 1024).toFixed(1)} KiB` : `${Math.round(count)} B`);
