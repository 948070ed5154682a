// The result of the query edit_effect.
export interface TokenComparison {
  token: number;
  text: string;
  probability_before: number | null;
  probability_after: number | null;
  rank_before: number | null;
  rank_after: number | null;
}

export interface EditEffect {
  sites: string[];
  top_tokens?: TokenComparison[];
  loss_before?: number | null;
  loss_after?: number | null;
  kl?: number | null;
  top5_overlap?: number | null;
}
