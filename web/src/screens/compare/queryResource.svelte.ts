// State of one query of a panel: its result, progress and problem. Starting it again drops the previous result.
import { runQuery, type Progress } from "../../lib/queryClient";
import type { QueryResult } from "../../lib/protocol";

export class QueryResource<F> {
  result = $state.raw<QueryResult<F>>();
  progress = $state.raw<Progress>();
  problem = $state("");
  isRunning = $state(false);
  #controller: AbortController | undefined;

  /** Send a query. Returns the function that cancels it, for $effect. */
  run(query: string, params: unknown): () => void {
    const controller = new AbortController();
    this.#controller = controller;
    [this.result, this.progress, this.problem, this.isRunning] = [undefined, undefined, "", true];
    runQuery<F>(query, params, {
      signal: controller.signal,
      onProgress: (progress) => (this.progress = progress),
      onPartial: (partial) => (this.result = partial as QueryResult<F>),
    })
      .then((result) => {
        if (!controller.signal.aborted) [this.result, this.isRunning] = [result, false];
      })
      .catch((error: Error) => {
        if (!controller.signal.aborted) [this.problem, this.isRunning] = [error.message, false];
      });
    return () => this.cancel(controller);
  }

  /** Stop the query; partial results stay. */
  cancel(controller = this.#controller): void {
    controller?.abort();
    if (controller === this.#controller) this.isRunning = false;
  }

  clear(): void {
    this.cancel();
    [this.result, this.progress, this.problem] = [undefined, undefined, ""];
  }
}
