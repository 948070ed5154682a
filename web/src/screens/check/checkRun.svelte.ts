// The run of the checks on the open model. It continues while another screen is shown.
import { runQuery, type Progress } from "../../lib/queryClient";
import type { Finding } from "./findings";

class CheckRun {
  /** Findings by check name, in the order in which they arrive. */
  findings = $state.raw<Record<string, Finding>>({});
  progress = $state.raw<Progress>();
  /** Duration of the last complete run in seconds. */
  seconds = $state<number>();
  /** Rounding noise of the model relative to its largest output, by dtype. */
  noise = $state.raw<Record<string, number>>({});
  problem = $state("");
  isCanceled = $state(false);
  #generation: number | undefined;
  #controller: AbortController | undefined;

  /** Discard the findings of another model. */
  setModel(generation: number | undefined): void {
    if (generation === this.#generation) return;
    this.#generation = generation;
    this.#controller?.abort();
    this.#reset();
  }

  #reset(): void {
    [this.findings, this.progress, this.seconds, this.noise, this.problem, this.isCanceled] = [{}, undefined, undefined, {}, "", false];
  }

  async start(options: { preflight: boolean; budget: number }): Promise<void> {
    this.#controller?.abort();
    const controller = new AbortController();
    this.#controller = controller;
    this.#reset();
    this.progress = { completed: 0, total: 1, description: "" };
    try {
      const { data } = await runQuery<{ seconds: number; noise: Record<string, number>; symptoms: Record<string, string> }>("run_check", options, {
        signal: controller.signal,
        onProgress: (progress) => (this.progress = progress),
        onPartial: (result) => {
          const finding = result.data as Finding;
          this.findings = { ...this.findings, [finding.check]: finding };
        },
      });
      [this.seconds, this.noise] = [data.seconds, data.noise];
      const symptoms = Object.entries(data.symptoms).map(([name, cause]) => [name, { ...this.findings[name], symptom_of: cause }]);
      this.findings = { ...this.findings, ...Object.fromEntries(symptoms) };
    } catch (error) {
      if (!controller.signal.aborted) this.problem = (error as Error).message;
    } finally {
      if (this.#controller === controller) this.progress = undefined;
    }
  }

  cancel(): void {
    this.#controller?.abort();
    [this.progress, this.isCanceled] = [undefined, true];
  }
}

export const checkRun = new CheckRun();
