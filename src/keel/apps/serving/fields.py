"""Row numbers of the arrays in `keel.apps.serving.arrays`.

One array for all whole numbers of requests and one for all times, in place of one for each kind:
loops with a hundred arrays took two minutes to compile, and a third of their time to be called.
"""

from __future__ import annotations

# Rows of a request: integers, and times.
(
    Q_PROMPT, Q_OUTPUT, Q_PREFILL, Q_PROCESSED, Q_HELD, Q_NEXT, Q_REPLICA, Q_HIT, Q_RESTARTS,
    Q_LOST, Q_INTS,
) = range(11)  # fmt: skip
Q_ARRIVAL, Q_STARTED, Q_FIRST_TOKEN, Q_FINISHED, Q_TIMES = range(5)

# Rows of a replica.
(
    R_HEAD, R_TAIL, R_WAITING, R_WAITING_TOKENS, R_ASIDE, R_SIZE, R_MORE, R_FREE, R_UP,
    R_DONE_TOKENS, R_FINISHED, R_RING_FROM, R_RING_COUNT, R_ROOM, R_CACHED, R_TICKS, R_NAMES,
    R_READING, R_INTS,
) = range(19)  # fmt: skip
R_END, R_BEGUN, R_SECONDS, R_BUSY, R_PACE, R_TIMES = range(6)

# Rows of a router's view of a replica.
V_WAITING, V_RUNNING, V_UNREAD, V_SENT, V_SENT_TOKENS, V_UP, V_HIT, V_INTS = range(8)
V_MEMORY, V_PACE, V_REPORTED, V_TIMES = range(4)
