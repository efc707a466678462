"""Context parallelism as one machine: layouts, masks, plans, executors and block kernels.

A *layout* says which tokens a rank owns, a *mask rule* which keys a query sees, a *plan* what moves between
ranks and what each rank computes. Plans are made by pure functions of sizes and rules; *executors* carry them
out with a *block kernel*. Nothing here knows megatron-core.
"""
