-- The queries of `nvprof_kit._trace.jobs.tables.JobTables`, each after its name. What stands in {braces} is filled in:
-- `symmetric` are the collectives that cannot end on any rank before all ranks have arrived.

-- How many sets of phases the ranks compute in.
-- name: phases_of_ranks
SELECT count(DISTINCT phases) FROM (
    SELECT string_agg(DISTINCT phase, ' ' ORDER BY phase) AS phases
    FROM ({layers}) WHERE compute_ns > 0 GROUP BY rank
)

-- Whether the collectives of all ranks have the ids of their operations.
-- name: has_operations
SELECT min(known) FROM (SELECT max(operation) >= 0 AS known FROM collectives GROUP BY rank)

-- The collectives with the keys that match them across ranks: communicator, step and number.
-- name: members
CREATE VIEW members AS
SELECT x.rank, x.index, x.kind, x.step, bytes, size, start_ns, end_ns, alone_ns AS alone, {comm} AS comm,
    CASE WHEN kind IN ('Send', 'Recv', 'SendRecv') THEN 'SendRecv' ELSE kind END AS sort,
    coalesce(r.c, CASE WHEN {operation} >= 0 AND {comm} LIKE 'stream %' THEN 0
        ELSE hash({comm}, coalesce(part, 0)) END) AS c,
    coalesce(r.s, CASE WHEN {operation} >= 0 OR {sequence} >= 0 THEN -2 ELSE x.step END) AS s,
    coalesce(r.k, CASE WHEN {operation} >= 0 THEN {operation} WHEN {sequence} >= 0 THEN sequence
        ELSE {number} END) AS k
FROM collectives AS x LEFT JOIN parts AS p ON p.comm = {comm} AND p.rank = x.rank
    LEFT JOIN renumbered AS r ON r.rank = x.rank AND r.index = x.index

-- The number of collectives by key.
-- name: tallies
CREATE OR REPLACE TABLE tallies AS
SELECT c, comm, s, rank, count(*) AS n FROM members GROUP BY c, comm, s, rank

-- name: collectives_by_rank
SELECT sum(n)::BIGINT AS n FROM tallies GROUP BY rank

-- name: ends
SELECT c, s, k, rank, end_ns, end_ns - start_ns AS took_ns, sort IN {symmetric} AS symmetric
FROM members WHERE hash(s, k) % {keep_every} = 0

-- The ranks of the communicators known only by stream.
-- name: stream_members
SELECT DISTINCT comm, rank FROM tallies WHERE comm LIKE 'stream %' AND s >= -1 ORDER BY ALL

-- name: stream_ends
SELECT comm, s, k, rank, end_ns, size FROM members WHERE comm LIKE 'stream %' AND s >= -1 AND rank IN ({ranks})

-- Sends and receives identified only by stream and order.
-- name: messages
SELECT rank, index, kind, step, bytes, start_ns, end_ns FROM members
WHERE sort = 'SendRecv' AND s <> -2 AND comm LIKE 'stream %' ORDER BY rank, index

-- Communicators and steps with different numbers of order-matched collectives on their ranks.
-- name: odd_steps
SELECT c, s FROM (SELECT c, s, rank, sum(n) AS n FROM tallies WHERE s <> -2 GROUP BY c, s, rank)
GROUP BY c, s HAVING min(n) <> max(n)

-- name: members_of_steps
SELECT rank, index, c, s, sort, end_ns FROM members SEMI JOIN given_steps USING (c, s)

-- The collectives on the common clock.
-- name: matched
CREATE OR REPLACE VIEW matched AS
SELECT m.*, m.start_ns + t.offset_ns + CAST(round(t.drift * (m.start_ns - t.at_ns)) AS BIGINT) AS a,
    m.end_ns + t.offset_ns + CAST(round(t.drift * (m.end_ns - t.at_ns)) AS BIGINT) AS e
FROM members AS m JOIN clocks AS t USING (rank)

-- One row per matched collective. There are millions of groups, so each has few bytes: rank and index are packed into
-- one integer, kinds are codes, and sums of what is far below 2^53 are floating-point numbers, which are exact there.
-- name: matches
CREATE OR REPLACE TABLE matches AS
SELECT * EXCLUDE (late, low, high, sum_alone, late_alone), (late >> 32)::INTEGER AS late_rank,
    (late & 4294967295)::INTEGER AS late_index, coalesce({sorts}[low], '') AS sort, low <> high AS unlike,
    sum_alone::BIGINT - late_alone AS alone_ns
FROM (
    SELECT c, s, k, count(*)::INTEGER AS n, max(a) AS arrival, arg_max((rank << 32) | index, a) AS late,
        sum(a) AS sum_a, max(e) AS ended, arg_min(e, a) AS first_end, min(sort) AS low, max(sort) AS high,
        coalesce(min(step) FILTER (WHERE step >= 0), -1) AS step,
        max(bytes) AS bytes, max(size)::INTEGER AS size, sum(alone::DOUBLE) AS sum_alone,
        arg_max(alone, a) AS late_alone
    FROM (SELECT * REPLACE (CASE sort {code_of_sort} ELSE 0 END::UTINYINT AS sort) FROM matched)
    GROUP BY c, s, k HAVING count(*) > 1
)

-- The wait time of each rank in each matched collective. With two ranks, or in a collective that a rank can finish
-- before others arrive, a wait ends with it at the latest.
-- name: waiting
CREATE OR REPLACE VIEW waiting AS
SELECT m.rank, m.step, c, s, k, i.sort, i.late_rank, i.arrival - m.a AS late_ns,
    CASE WHEN n = 2 OR i.sort NOT IN {symmetric} THEN least(late_ns, greatest(m.e - m.a, 0)) ELSE late_ns END AS wait_ns
FROM matched AS m JOIN matches AS i USING (c, s, k) WHERE NOT unlike

-- name: clipped
CREATE OR REPLACE TABLE clipped AS
SELECT c, s, k, sum(wait_ns)::BIGINT AS clipped_ns FROM waiting WHERE sort NOT IN {symmetric} GROUP BY c, s, k

-- The matched collectives of one kind with the wait time of all their ranks: without those that end alone, sums do.
-- name: instances
CREATE OR REPLACE VIEW instances AS
SELECT i.*, CAST(CASE WHEN clipped_ns IS NOT NULL THEN clipped_ns
    WHEN n = 2 THEN least(n * arrival::HUGEINT - sum_a, greatest(first_end - (sum_a - arrival), 0))
    ELSE n * arrival::HUGEINT - sum_a END AS BIGINT) AS wait_ns
FROM matches AS i LEFT JOIN clipped USING (c, s, k) WHERE NOT unlike

-- name: chosen_instances
SELECT c, s, k, n, step, sort, bytes, size, arrival, late_rank, late_index, ended, wait_ns, alone_ns
FROM instances {order}

-- name: matrix
SELECT rank AS waiting_rank, late_rank, sum(wait_ns)::BIGINT AS wait_ns FROM waiting
WHERE rank <> late_rank AND NOT list_contains({without}::BIGINT[], step)
GROUP BY rank, late_rank ORDER BY waiting_rank, late_rank

-- The number of matched collectives.
-- name: count
SELECT count(*) FROM matches WHERE NOT unlike

-- The number of matched collectives with different kinds on their ranks.
-- name: unlike
SELECT count(*) FROM matches WHERE unlike

-- name: matched_collectives
SELECT coalesce(sum(n), 0) FROM matches

-- The wait time of all ranks.
-- name: total_wait
SELECT coalesce(sum(wait_ns), 0) FROM instances

-- Wait time by step, communicator and last rank; exposed_ns is about the part of it without concurrent work.
-- name: by_late_rank
SELECT step, c, late_rank, max(n) AS n, sum(wait_ns)::BIGINT AS wait_ns,
    sum(least(wait_ns, alone_ns))::BIGINT AS exposed_ns
FROM instances GROUP BY step, c, late_rank

-- Transfer times by communicator, kind and size; n are the ranks of the communicator, if unknown those present.
-- name: transfers
SELECT c, sort, bytes, greatest(max(n), max(size)) AS n, count(*) AS count, count(DISTINCT step) AS steps,
    quantile_cont(ended - arrival, 0.5) AS median_ns
FROM matches WHERE NOT unlike GROUP BY c, sort, bytes

-- name: communicators
SELECT c, list(DISTINCT rank ORDER BY rank) FROM tallies GROUP BY c

-- Use of communicators.
-- name: uses
SELECT m.c, min(m.comm) AS comm, max(x.group) AS group, m.kind, x.phase, max(m.size) AS size,
    list(DISTINCT m.rank) AS ranks, count(*) AS collectives
FROM members AS m JOIN collectives AS x USING (rank, index)
GROUP BY m.c, m.kind, x.phase ORDER BY m.c, m.kind, x.phase

-- The members of matched sends and receives in steps.
-- name: passed_on
SELECT c, s, k, rank, kind, step, a, e, alone FROM matched SEMI JOIN matches USING (c, s, k)
WHERE sort = 'SendRecv' AND step >= 0

-- Device activity in steps; passes_on is whether it is in a send or receive alone.
-- name: step_times
SELECT p.step, p.rank, p.doing, coalesce(x.sort = 'SendRecv', false) AS passes_on, sum(p.ns)::BIGINT AS ns
FROM segments AS p LEFT JOIN members AS x ON x.rank = p.rank AND x.index = p.collective
WHERE p.step >= 0 GROUP BY ALL

-- name: members_of
SELECT c, s, k, rank, index, comm, a, e, alone FROM matched SEMI JOIN given_instances USING (c, s, k)

-- name: points
SELECT m.rank, m.index, m.c, m.s, m.k, m.step, m.a, m.e, x.ready_segment, x.end_segment, x.gates,
    x.start_ns - x.ready_ns AS queued_ns, x.layer, x.phase, i.arrival, i.late_rank, i.sort
FROM matched AS m JOIN collectives AS x USING (rank, index) LEFT JOIN matches AS i USING (c, s, k)
WHERE m.rank IN ({ranks}) ORDER BY m.rank, m.index

-- name: segments
SELECT * FROM segments WHERE rank IN ({ranks}) ORDER BY rank, segment

-- name: has_steps
SELECT bool_or(step >= 0) FROM layers

-- name: layer_medians
SELECT rank, layer, phase, round(quantile_cont(compute_ns, 0.5))::BIGINT AS median_ns,
    round(quantile_cont(idle_ns, 0.5))::BIGINT AS idle_ns, round(quantile_cont(comm_ns, 0.5))::BIGINT AS comm_ns,
    round(quantile_cont(ops, 0.5))::BIGINT AS ops, count(*) AS steps
FROM layers WHERE {in_steps} AND rank BETWEEN {first} AND {last} GROUP BY rank, layer, phase

-- name: excesses
WITH time AS (SELECT step, rank, layer, phase, {ns} AS ns, ops FROM layers WHERE step >= 0),
    usual AS (SELECT step, layer, phase, quantile_disc(ns, 0.5) AS median_ns, quantile_disc(ops, 0.5) AS median_ops
        FROM time GROUP BY step, layer, phase)
SELECT step, rank, '{kind}' AS kind, layer, phase, ns - median_ns AS excess_ns, ops > median_ops AS more_ops
FROM time JOIN usual USING (step, layer, phase)
WHERE ns - median_ns > greatest({least_ns}, {least_share} * median_ns)

-- Excess time of a column (loading_ns or gc_ns) in a step over the median of the ranks.
-- name: host_excesses
SELECT step, rank, {column} - usual AS excess_ns FROM steps
JOIN (SELECT step, quantile_disc({column}, 0.5) AS usual FROM steps GROUP BY step) USING (step)
WHERE {column} - usual > {least_ns}

-- The steps of each rank; shared is the number that another rank has too.
-- name: step_ranges
SELECT rank, min(step) AS first, max(step) AS last, count(*) AS steps, count(*) FILTER (WHERE n > 1) AS shared
FROM (SELECT DISTINCT rank, step FROM steps)
JOIN (SELECT step, count(DISTINCT rank) AS n FROM steps GROUP BY step) USING (step) GROUP BY rank ORDER BY rank

-- Steps: the median over ranks, and whether it is warm-up on any rank.
-- name: step_lengths
SELECT step, quantile_disc(end_ns - start_ns, 0.5) AS median_ns, count(*) AS ranks, bool_or(warm_up) AS warm_up
FROM steps GROUP BY step ORDER BY step

-- name: all_steps
SELECT DISTINCT step, rank, true AS matched FROM steps

-- name: matched_steps
SELECT step, rank, bool_or(n IS NOT NULL) AS matched FROM matched
LEFT JOIN (SELECT c, s, k, n FROM matches) USING (c, s, k) WHERE step >= 0 GROUP BY step, rank

-- Step by rank; wait_ns is in matched collectives.
-- name: rank_steps
WITH work AS (SELECT rank, step, sum(compute_ns)::BIGINT AS compute_ns, sum(idle_ns)::BIGINT AS idle_ns
        FROM layers GROUP BY rank, step),
    waits AS (SELECT rank, step, sum(wait_ns)::BIGINT AS wait_ns FROM waiting GROUP BY rank, step)
SELECT step, rank, end_ns - start_ns AS length_ns, coalesce(compute_ns, 0) AS compute_ns,
    coalesce(idle_ns, 0) AS idle_ns, coalesce(wait_ns, 0) AS wait_ns
FROM steps LEFT JOIN work USING (rank, step) LEFT JOIN waits USING (rank, step) ORDER BY step, rank
