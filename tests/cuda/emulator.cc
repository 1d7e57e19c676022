/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads of a block as fibers. A fiber goes on until it waits; then the next that may go on
 * does, upwards and downwards in turn, so that nobody can rely on an order. Under ThreadSanitizer
 * switching orders nothing, only barriers do.
 *
 * Fibers are made once and run one thread after another: making one costs system calls, switching
 * none (but under sanitizers).
 */
#include <setjmp.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <vector>

#include <cuda_runtime.h>
#include <ptx_emulated.h>

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined __SANITIZE_ADDRESS__ || __has_feature(address_sanitizer)
#define ASAN 1
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN 0
#endif
/* Who switches is not looked at himself: -fno-sanitize=thread -DTSAN=1. */
#ifndef TSAN
#define TSAN 0
#endif
#if TSAN
#include <sanitizer/tsan_interface.h>
#endif
#define SANITIZED (ASAN || TSAN)

#define STACK ((size_t)256 << 10)
#define LANES 32

__thread dim3 threadIdx, blockIdx, blockDim, gridDim;
__thread char *emulated_shared;

static void die(const char *what)
{
	fprintf(stderr, "emulated kernel: %s\n", what);
	abort();
}

struct copy {
	void *to;
	const void *from;
	int bytes;
};

struct barrier {
	unsigned generation;
	int arrived;
};

struct fiber {
	dim3 place;		/* in its block */
	ucontext_t context;
	jmp_buf at;
	char *stack;
	void *sanitizer, *fake;
	bool begun, busy;		/* inside the kernel */
	const unsigned *waits;		/* until *waits != seen */
	unsigned seen;
	std::deque<std::vector<copy>> groups;	/* of asynchronous copies; the last is open */
};

/* What the lanes of a mask tell each other: by the mask's first lane, twice. */
struct meeting {
	struct barrier barrier;
	unsigned mask;
	char slot[2][LANES][64];
};

struct block {
	std::vector<struct fiber *> fibers;
	std::vector<struct meeting> meetings;	/* [warps * LANES] */
	const std::function<void()> *body;
	struct barrier barrier;
	int n, alive, self;
	int count[2];
	ucontext_t context;
	jmp_buf at;
	void *sanitizer, *fake;
	const void *stack;
	size_t stack_size;

	~block();
};

static thread_local struct block *running;

static struct fiber *me(void)
{
	return running->fibers[(size_t)running->self];
}

/* ---- switching ------------------------------------------------------------------------------- */

static void sanitizer_leave(void **fake, const void *stack, size_t size, void *to)
{
	(void)fake, (void)stack, (void)size, (void)to;
#if ASAN
	__sanitizer_start_switch_fiber(fake, stack, size);
#endif
#if TSAN
	__tsan_switch_to_fiber(to, __tsan_switch_to_fiber_no_sync);
#endif
}

static void sanitizer_enter(void *fake, const void **stack, size_t *size)
{
	(void)fake, (void)stack, (void)size;
#if ASAN
	__sanitizer_finish_switch_fiber(fake, stack, size);
#endif
}

static void to_scheduler(void)
{
	struct block *b = running;
	struct fiber *f = me();

	if (SANITIZED) {
		sanitizer_leave(&f->fake, b->stack, b->stack_size, b->sanitizer);
		swapcontext(&f->context, &b->context);
		sanitizer_enter(f->fake, &b->stack, &b->stack_size);
	} else if (!_setjmp(f->at)) {
		_longjmp(b->at, 1);
	}
}

static void fiber_main(void)
{
	sanitizer_enter(NULL, &running->stack, &running->stack_size);
	for (;;) {
		struct block *b = running;
		struct fiber *f = me();

#if TSAN
		__tsan_acquire(&b->body);
#endif
		(*b->body)();
		f->busy = false;
		b->alive--;
#if TSAN
		__tsan_release(&b->alive);
#endif
		/* who has ended does not hold up the others */
		if (b->alive && b->barrier.arrived == b->alive) {
			b->barrier.arrived = 0;
			b->barrier.generation++;
		}
		to_scheduler();
	}
}

static void to_fiber(struct block *b, int i)
{
	struct fiber *f = b->fibers[(size_t)i];
	bool first = !f->begun;

	b->self = i;
	threadIdx = f->place;
	f->begun = true;
	if (SANITIZED) {
		sanitizer_leave(&b->fake, f->stack, STACK, f->sanitizer);
		swapcontext(&b->context, &f->context);
		sanitizer_enter(b->fake, NULL, NULL);
	} else if (!_setjmp(b->at)) {
		if (first)
			setcontext(&f->context);
		_longjmp(f->at, 1);
	}
}

static struct fiber *new_fiber(void)
{
	struct fiber *f = new fiber();
	void *p = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		die("no memory for a stack");
	f->stack = (char *)p;
	getcontext(&f->context);
	f->context.uc_stack.ss_sp = f->stack;
	f->context.uc_stack.ss_size = STACK;
	f->context.uc_link = NULL;
	makecontext(&f->context, fiber_main, 0);
#if TSAN
	f->sanitizer = __tsan_create_fiber(0);
#endif
	return f;
}

block::~block()
{
	for (struct fiber *f : fibers) {
#if TSAN
		__tsan_destroy_fiber(f->sanitizer);
#endif
		munmap(f->stack, STACK);
		delete f;
	}
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void wait_for(const unsigned *generation, unsigned seen)
{
	struct fiber *f = me();

	f->waits = generation;
	f->seen = seen;
	while (*generation == seen)
		to_scheduler();
	f->waits = NULL;
}

static void arrive(struct barrier *b, int expected)
{
	unsigned seen = b->generation;

#if TSAN
	__tsan_release(b);
#endif
	if (++b->arrived == expected) {
		b->arrived = 0;
		b->generation++;
	} else {
		wait_for(&b->generation, seen);
	}
#if TSAN
	__tsan_acquire(b);
#endif
}

void emulated_block_barrier(void)
{
	arrive(&running->barrier, running->alive);
}

int emulated_block_count(int mine)
{
	struct block *b = running;
	int r;

	__atomic_fetch_add(&b->count[0], mine, __ATOMIC_RELAXED);
	emulated_block_barrier();
	r = __atomic_load_n(&b->count[0], __ATOMIC_RELAXED);
	emulated_block_barrier();
	__atomic_store_n(&b->count[0], 0, __ATOMIC_RELAXED);
	emulated_block_barrier();
	return r;
}

static int thread_number(void)
{
	return (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

int emulated_lane(void)
{
	return thread_number() % LANES;
}

/* Lanes of the last warp that do not exist are not waited for. */
static unsigned lanes_of_warp(int warp)
{
	int n = running->n - warp * LANES;

	return n >= LANES ? 0xffffffffu : (1u << n) - 1;
}

const char *emulated_exchange(unsigned mask, const void *mine, size_t bytes)
{
	int warp = thread_number() / LANES, lane = emulated_lane();
	struct meeting *m;
	unsigned turn;

	mask &= lanes_of_warp(warp);
	if (!(mask >> lane & 1) || bytes > 64)
		die("a lane is not in its own mask");
	m = &running->meetings[(size_t)(warp * LANES + __builtin_ctz(mask))];
	if (m->barrier.arrived && m->mask != mask)
		die("lanes meet under different masks");
	m->mask = mask;
	turn = m->barrier.generation & 1;
	memcpy(m->slot[turn][lane], mine, bytes);
	arrive(&m->barrier, __builtin_popcount(mask));
	return m->slot[turn][0];
}

/* ---- asynchronous copies --------------------------------------------------------------------- */

void emulated_copy(void *shared, const void *global, int bytes)
{
	std::deque<std::vector<copy>> &g = me()->groups;

	if (g.empty())
		g.emplace_back();
	g.back().push_back({ shared, global, bytes });
}

void emulated_copy_commit(void)
{
	std::deque<std::vector<copy>> &g = me()->groups;

	if (g.empty())
		g.emplace_back();
	g.emplace_back();
}

void emulated_copy_wait(int pending)
{
	std::deque<std::vector<copy>> &g = me()->groups;

	/* the last group is not committed: it is not waited for */
	while ((int)g.size() > pending + 1) {
		for (const copy &c : g.front()) {
			memset(c.to, 0, 16);
			memcpy(c.to, c.from, (size_t)c.bytes);
		}
		g.pop_front();
	}
}

/* ---- a grid ---------------------------------------------------------------------------------- */

static void finish_copies(struct fiber *f)
{
	for (const std::vector<copy> &g : f->groups)
		if (!g.empty())
			die("a thread ended with copies under way");
	f->groups.clear();
}

static void run_block(struct block *b)
{
	bool up = true;

	while (b->alive) {
		int moved = 0;

		for (int k = 0; k < b->n; k++) {
			int i = up ? k : b->n - 1 - k;
			struct fiber *f = b->fibers[(size_t)i];

			if (!f->busy || (f->waits && *f->waits == f->seen))
				continue;
			to_fiber(b, i);
			moved++;
		}
		if (b->alive && !moved)
			die("threads wait for others that do not come");
		up = !up;
	}
#if TSAN
	__tsan_acquire(&b->alive);
#endif
	for (int i = 0; i < b->n; i++)
		finish_copies(b->fibers[(size_t)i]);
}

static void place_threads(struct block *b)
{
	for (int i = 0; i < b->n; i++) {
		struct fiber *f = b->fibers[(size_t)i];

		f->place = dim3((unsigned)i % blockDim.x, (unsigned)i / blockDim.x % blockDim.y,
				(unsigned)i / (blockDim.x * blockDim.y));
		f->busy = true;
		f->waits = NULL;
	}
	b->alive = b->n;
	b->barrier.arrived = 0;
#if TSAN
	__tsan_release(&b->body);
#endif
	for (struct meeting &m : b->meetings)
		m.barrier.arrived = 0;
}

/* Runs a whole grid on the calling thread. */
void emulated_run(const struct cudaLaunchConfig_t *c, const std::function<void()> &body)
{
	static thread_local struct block room;
	struct block *b = &room;
	/* not a byte more than asked for, and nothing that looks like a number in it */
	void *shared = NULL;

	if (posix_memalign(&shared, 128, c->dynamicSmemBytes + 1))
		die("no memory for a block");
	b->n = (int)(c->blockDim.x * c->blockDim.y * c->blockDim.z);
	while ((int)b->fibers.size() < b->n)
		b->fibers.push_back(new_fiber());
	if (b->meetings.size() < (size_t)(b->n + LANES - 1) / LANES * LANES)
		b->meetings.resize((size_t)(b->n + LANES - 1) / LANES * LANES);
	b->body = &body;
#if TSAN
	b->sanitizer = __tsan_get_current_fiber();
#endif
	running = b;
	blockDim = c->blockDim;
	gridDim = c->gridDim;
	emulated_shared = (char *)shared;
	for (unsigned z = 0; z < c->gridDim.z; z++)
		for (unsigned y = 0; y < c->gridDim.y; y++)
			for (unsigned x = 0; x < c->gridDim.x; x++) {
				memset(shared, 0xff, c->dynamicSmemBytes);
				blockIdx = dim3(x, y, z);
				place_threads(b);
				run_block(b);
			}
	running = NULL;
	free(shared);
}
