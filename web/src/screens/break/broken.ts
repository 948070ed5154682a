// What the server says of a broken model.
export interface Top {
  token: number;
  text: string;
  before: number | null;
  after: number | null;
  rank_before: number | null;
  rank_after: number | null;
}

export interface Broken {
  points: string[];
  top?: Top[];
  loss_before?: number | null;
  loss_after?: number | null;
  kl?: number | null;
  kept?: number | null;
}
