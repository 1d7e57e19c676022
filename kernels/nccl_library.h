/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_library: the functions of NCCL that we call, in a library that is opened when it is used. */
#ifndef DSPARK_NCCL_LIBRARY_H
#define DSPARK_NCCL_LIBRARY_H

#include <nccl.h>

struct err;

#define NCCL_FUNCTIONS(F)                                                                     \
	F(GetVersion) F(GetUniqueId) F(CommInitRankConfig) F(CommSplit) F(CommFinalize)       \
	F(CommDestroy) F(CommAbort) F(CommGetAsyncError) F(CommCount) F(CommUserRank)         \
	F(GetErrorString) F(GetLastError) F(AllReduce) F(Broadcast) F(AllGather) F(Send)      \
	F(Recv) F(GroupStart) F(GroupEnd)

#define NCCL_POINTER(name) __typeof__(nccl##name) *name;
struct nccl_library {
	void *handle;
	NCCL_FUNCTIONS(NCCL_POINTER)
};
#undef NCCL_POINTER

extern struct nccl_library nccl;	/* usable after nccl_open */

/* Opens libnccl.so.2 once; refuses one that is older than 2.18 (ncclCommSplit). */
int nccl_open(struct err *e);

#endif
