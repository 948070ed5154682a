// Loads the activations of all checkpoints of a run for one text, one checkpoint at a time, the selected one first.
import { runQuery } from "../../lib/queryClient";
import type { ModelInput } from "../../lib/session.svelte";
import type { CheckpointActivations, CheckpointResult } from "./runQueries";

export class CheckpointLoader {
  /** Results by checkpoint id. */
  results = $state.raw<Record<string, CheckpointResult>>({});
  /** Reasons of checkpoints that could not be loaded, such as one that the run has removed. */
  problems = $state.raw<Record<string, string>>({});
  isLoading = $state(false);
  #input = "";

  /** Load the missing results; the returned function cancels it. Results of another text are dropped. */
  load(ids: string[], selected: string | undefined, input: ModelInput, position: number): () => void {
    const key = JSON.stringify([input, position]);
    if (key !== this.#input) [this.#input, this.results, this.problems] = [key, {}, {}];
    const controller = new AbortController();
    const isMissing = (id: string): boolean => !(id in this.results) && !(id in this.problems);
    const queue = [...(selected ? [selected] : []), ...ids.filter((id) => id !== selected)].filter(isMissing);
    void this.#loadAll(queue, input, position, controller.signal);
    return () => controller.abort();
  }

  async #loadAll(queue: string[], input: ModelInput, position: number, signal: AbortSignal): Promise<void> {
    this.isLoading = queue.length > 0;
    for (const id of queue) {
      try {
        const { data, tensors } = await runQuery<CheckpointActivations>("checkpoint_activations", { id, input, position }, { signal });
        if (signal.aborted) return;
        this.results = { ...this.results, [id]: { data, tensors } };
      } catch (error) {
        if (signal.aborted) return;
        this.problems = { ...this.problems, [id]: (error as Error).message };
      }
    }
    this.isLoading = false;
  }
}
