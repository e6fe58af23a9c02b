"""A process group with NCCL's rules, on a CPU: what ends on it ends on GPUs, and what would hang there fails at once.

gloo forgives what NCCL does not: it buffers what is sent, gives every operation its own progress, and makes groups
with whoever turns up. Here numbers still move through gloo, but a coordinator decides when:

 1. A communicator is one stream on each rank. An operation begins when all that the rank issued before it on the same
    communicator have ended. (It is issued by a host that has done what came before, so computation needs no rule.)
 2. A collective ends when all its ranks have begun it. A send and its receive end when both have begun.
 3. A batch of sends and receives is one operation.
 4. `wait` orders what is issued afterwards. The host of a CPU has nothing else to order, so it waits.
 5. With `one_connection` (CUDA_DEVICE_MAX_CONNECTIONS=1) an operation begins only when all that its rank issued before
    it, on any communicator, have begun.
 6. A communicator comes from a split of its parent, which all ranks of the parent enter, with a colour or without one.
    Those of the host (gloo) need their own ranks only, but `torch` makes ranks outside them enter a split.
 7. The host waits in the first use of each algorithm of a communicator (all-reduce, all-gather, …) until all its ranks
    have come to it, and in the first message from one rank to another until both have: they connect, and allocate. In
    a step of the program that is an error, even where all come.

The i-th collective of a communicator must be the same on all its ranks, and a receive as large as its send. All that an
operation waits for it needs, so a deadlock is what cannot end in this graph, looked for whenever a rank comes to wait.

`rules` is this state machine, pure. `coordinator` serves it to the processes of a pool. `client` issues operations and
moves numbers in the order in which they end; `group` is the `torch.distributed.ProcessGroup`; `install` registers it.
"""
