// Polls the metrics and the checkpoints of a run. Only what has changed is transferred; a finished run is read once.
import { runQuery } from "../../lib/queryClient";
import type { Tensor } from "../../lib/protocol";
import type { RunCheckpoints, RunMetrics, RunStatus } from "./runQueries";

const TRAINING_INTERVAL_MS = 3000;
const STOPPED_INTERVAL_MS = 10000;

export class RunPoller {
  status = $state.raw<RunStatus>();
  metrics = $state.raw<RunMetrics>();
  tensors = $state.raw<Record<string, Tensor>>({});
  saved = $state.raw<RunCheckpoints>();
  problem = $state("");
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** Start polling; the returned function stops it. */
  start(): () => void {
    const controller = new AbortController();
    void this.#poll(controller.signal);
    return () => {
      controller.abort();
      clearTimeout(this.#timer);
    };
  }

  async #poll(signal: AbortSignal): Promise<void> {
    try {
      const { data, tensors } = await runQuery<RunMetrics>("run_metrics", { known_rows: this.status?.num_rows ?? 0 }, { signal });
      const hasChanged = !data.unchanged || data.state !== this.status?.state || !this.saved?.checkpoints.length;
      this.status = data;
      if (!data.unchanged) [this.metrics, this.tensors] = [data, tensors];
      if (hasChanged) this.saved = (await runQuery<RunCheckpoints>("run_checkpoints", {}, { signal })).data;
      this.problem = "";
    } catch (error) {
      if (signal.aborted) return;
      this.problem = (error as Error).message;
    }
    if (this.status?.state === "finished" && !this.problem) return;
    this.#timer = setTimeout(() => void this.#poll(signal), this.status?.state === "training" ? TRAINING_INTERVAL_MS : STOPPED_INTERVAL_MS);
  }
}
