// What the figures of several servers are together. Must not know the page.

const SUMMED = [
  "num_running",
  "num_waiting",
  "kv_blocks_used",
  "kv_blocks_total",
  "engine_restarts",
];

/**
 * Return the sums of servers' loads; NaN where no server says one.
 *
 * `engine_age_s` is that of the engine that was loaded last; null if none says it.
 */
export function summed(loads) {
  const sum = {};
  for (const name of SUMMED) {
    const values = loads.map((load) => load[name]).filter(Number.isFinite);
    sum[name] = values.length > 0 ? values.reduce((one, other) => one + other, 0) : NaN;
  }
  const ages = loads.map((load) => load.engine_age_s).filter(Number.isFinite);
  sum.engine_age_s = ages.length > 0 ? Math.min(...ages) : null;
  return sum;
}

/** Return the state of all servers, "good", "some", "bad" or "unknown", and its words. */
export function stateOf(servers) {
  const up = servers.filter((server) => server.is_up).length;
  if (servers.length === 0) return ["unknown", "no server"];
  if (up === servers.length) return ["good", "ready"];
  if (up > 0) return ["some", `${up} of ${servers.length} ready`];
  const reason = servers[0].reason;
  return ["bad", servers.length === 1 && reason ? reason : "not ready"];
}
