/* scratch memory: blocks per thread, kept until it ends */
enum { ROWS, PANELS, SUMS, EXPERT, PACKED, GROUPS = PACKED + 2, SCRATCHES = GROUPS + 2 }; /* two PACKED and GROUPS */
struct pool {
    float *data[SCRATCHES];
    size_t size[SCRATCHES];
};
static pthread_key_t pool_key;

static void free_pool(void *given) {
    struct pool *pool = given;
    for (int i = 0; i < SCRATCHES; i++) free(pool->data[i]);
    free(pool);
}

__attribute__((constructor)) static void make_pool_key(void) {
    if (pthread_key_create(&pool_key, free_pool)) abort();
}

static float *scratch(int which, size_t floats) {
    struct pool *pool = pthread_getspecific(pool_key);
    if (!pool) {
        pool = calloc(1, sizeof *pool);
        if (!pool || pthread_setspecific(pool_key, pool)) abort();
    }
    if (floats > pool->size[which]) {
        free(pool->data[which]);
        pool->size[which] = (floats + 4095) / 4096 * 4096;
        pool->data[which] = aligned_alloc(64, pool->size[which] * 4);
        if (!pool->data[which]) abort();
    }
    return pool->data[which];
}

INLINE void fetch(const char *at, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
}

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long min_l(long a, long b) { return a < b ? a : b; }
INLINE long max_l(long a, long b) { return a > b ? a : b; }
INLINE int outside(long index, long size) { return index < 0 || index >= size; }
INLINE long int_at(const void *p, long i, int is64) {
    return is64 ? (long)((const int64_t *)p)[i] : ((const int32_t *)p)[i];
}

/* threads
 * Every calling thread has workers of its own.  A loop is cut into chunks, of which each thread has a range.  It claims
 * them one by one, and a little later those that others have not begun: the loop ends with its last chunk, and a worker
 * that has no core just then delays nothing.  After a loop the workers look for the next one for a while (kernels follow
 * each other within microseconds), then they sleep.  Workers beyond the number of the last loop sleep until a loop wants
 * more: their cores are another process's.  A thread writes to cache lines of its own, which others read when it is done
 * with them: threads that change one line in turn wait for each other.  While a worker looks for work, it fetches its share
 * of the weights that are multiplied next, if they are known. */
#define MAX_THREADS 256
#define CHUNKS 16                /* of a loop, per thread, at most */
#define ALONE (512 * VL)         /* numbers of several rows below which one thread rounds or normalises them all */
#define FETCHED (256 << 10) /* most bytes of the next weights that a worker fetches: they stay in its L2 cache */
#define LOOKING_NS (300 * 1000L) /* how long a worker looks for work before it sleeps: longer than Python between two steps */

typedef void loop_fn(void *arg, long begin, long end);

struct team;
struct worker {
    struct team *team;
    int number;
    pthread_t thread;
};
struct range {
    _Alignas(64) _Atomic uint64_t next; /* number of the last loop in which a chunk was claimed << 32 | chunks claimed */
    _Alignas(64) _Atomic uint64_t done; /* number of a loop << 32 | chunks, of any range, that its owner has computed */
};
struct team {
    _Alignas(64) _Atomic uint64_t ticket; /* the current loop: number << 32 | chunks << 16 | threads */
    loop_fn *body;                        /* valid for whoever has claimed a chunk that is not done */
    void *arg;
    long items, chunk;
    _Alignas(64) _Atomic int asleep, stopping;
    _Atomic int limit; /* threads of the last loop */
    _Atomic(const char *) weights; /* that are multiplied next, or 0 */
    _Atomic long weight_bytes;
    struct range ranges[MAX_THREADS];
    int count; /* workers */
    pthread_mutex_t lock;
    pthread_cond_t wake, more; /* for the next loop; for a higher limit */
    struct worker workers[MAX_THREADS - 1];
};
static pthread_key_t team_key;

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* the next chunk of a range, or -1; also for a thread that is late, when the loop has ended */
static long claim(struct range *range, uint32_t loop, long chunks) {
    uint64_t seen = atomic_load(&range->next);
    for (;;) {
        int32_t ahead = (int32_t)((uint32_t)(seen >> 32) - loop);
        long next = ahead ? 0 : (long)(uint32_t)seen;
        if (ahead > 0 || next >= chunks) return -1;
        if (atomic_compare_exchange_weak(&range->next, &seen, (uint64_t)loop << 32 | (uint64_t)(next + 1))) return next;
    }
}

/* computes what is left of a range in the loop that `ticket` shows; `number`: of the thread, 0 is the caller */
static void compute(struct team *team, uint64_t ticket, long owner, long number) {
    long chunks = ticket >> 16 & 0xffff, threads = ticket & 0xffff, first = owner * chunks / threads, count = 0, next;
    uint32_t loop = (uint32_t)(ticket >> 32);
    while ((next = claim(&team->ranges[owner], loop, (owner + 1) * chunks / threads - first)) >= 0) {
        long begin = (first + next) * team->chunk;
        team->body(team->arg, begin, min_l(team->items, begin + team->chunk));
        count++;
    }
    if (!count) return;
    _Atomic uint64_t *done = &team->ranges[number].done;
    uint64_t before = atomic_load(done);
    uint64_t now = (before >> 32 == loop ? before : (uint64_t)loop << 32) + (uint64_t)count;
    atomic_store_explicit(done, now, memory_order_release);
}

/* the same of all other ranges */
static void help(struct team *team, uint64_t ticket, long number) {
    long threads = ticket & 0xffff;
    for (long i = 1; i < threads; i++) compute(team, ticket, (number + i) % threads, number);
}

static int all_done(struct team *team, uint64_t ticket) {
    uint64_t chunks = ticket >> 16 & 0xffff, count = 0;
    for (uint64_t i = 0; i < (ticket & 0xffff); i++) {
        uint64_t done = atomic_load(&team->ranges[i].done);
        if (done >> 32 == ticket >> 32) count += done & 0xffffffff;
    }
    return count == chunks;
}

static void await_limit(struct worker *self) {
    struct team *team = self->team;
    pthread_mutex_lock(&team->lock);
    while (self->number >= atomic_load(&team->limit) && !atomic_load(&team->stopping))
        pthread_cond_wait(&team->more, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

static void set_limit(struct team *team, int limit) {
    if (limit <= atomic_load(&team->limit)) {
        atomic_store(&team->limit, limit);
        return;
    }
    pthread_mutex_lock(&team->lock);
    atomic_store(&team->limit, limit);
    pthread_cond_broadcast(&team->more);
    pthread_mutex_unlock(&team->lock);
}

static void *work(void *given) {
    struct worker *self = given;
    struct team *team = self->team;
    uint64_t last = 0, seen = 0; /* ticket of the last loop that it took part in, number of the last one that it has seen */
    const char *weights = 0;     /* its share of the next ones, as far as it is not fetched yet */
    long left = 0;
    for (;;) {
        uint64_t ticket = atomic_load(&team->ticket);
        for (long began = 0, spins = 0; ticket >> 32 == seen; ticket = atomic_load(&team->ticket)) {
            if (atomic_load(&team->stopping)) return 0;
            if (left > 0) {
                UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(weights + 64 * i, 0, 2); /* to the L2 cache */
                weights += 256, left -= 256;
            } else {
                pause_core();
            }
            if (++spins == HELP_AFTER) help(team, last, self->number);
            if (spins % 64) continue;
            if (!began) began = now_ns();
            if (now_ns() - began < LOOKING_NS) continue;
            pthread_mutex_lock(&team->lock);
            atomic_fetch_add(&team->asleep, 1);
            while (atomic_load(&team->ticket) >> 32 == seen && !atomic_load(&team->stopping))
                pthread_cond_wait(&team->wake, &team->lock);
            atomic_fetch_sub(&team->asleep, 1);
            pthread_mutex_unlock(&team->lock);
        }
        seen = ticket >> 32;
        left = 0;
        if (self->number < (long)(ticket & 0xffff)) {
            compute(team, last = ticket, self->number, self->number);
            long share = atomic_load(&team->weight_bytes) / (long)(ticket & 0xffff);
            weights = atomic_load(&team->weights) + self->number * share;
            left = min_l(share, FETCHED);
        } else {
            await_limit(self);
        }
    }
}

static void wake_all(struct team *team) {
    if (!atomic_load(&team->asleep)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

static void end_team(void *given) {
    struct team *team = given;
    pthread_mutex_lock(&team->lock);
    atomic_store(&team->stopping, 1);
    pthread_cond_broadcast(&team->wake);
    pthread_cond_broadcast(&team->more);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->count; i++) pthread_join(team->workers[i].thread, 0);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->wake);
    pthread_cond_destroy(&team->more);
    free(team);
}

__attribute__((constructor)) static void make_team_key(void) {
    if (pthread_key_create(&team_key, end_team)) abort();
}

/* the calling thread's team, with that many workers at least, or as many as can be started */
static struct team *team_of(int workers) {
    struct team *team = pthread_getspecific(team_key);
    if (!team) {
        team = aligned_alloc(64, sizeof *team);
        if (team) memset(team, 0, sizeof *team);
        if (!team || pthread_mutex_init(&team->lock, 0) || pthread_cond_init(&team->wake, 0) ||
            pthread_cond_init(&team->more, 0) || pthread_setspecific(team_key, team))
            abort();
    }
    if (team->count >= workers) return team;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team->count < workers) {
        struct worker *next = &team->workers[team->count];
        *next = (struct worker){.team = team, .number = team->count + 1};
        if (pthread_create(&next->thread, 0, work, next)) break;
        team->count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return team;
}

/* body(arg, begin, end) over all of [0, items), by up to nthreads threads */
static void parallel(long items, int nthreads, loop_fn *body, void *arg) {
    if (nthreads > MAX_THREADS) nthreads = MAX_THREADS;
    if (nthreads <= 1 || items <= 1) {
        if (items > 0) body(arg, 0, items);
        return;
    }
    struct team *team = team_of(nthreads - 1);
    long chunk = ceil_div(items, (long)CHUNKS * nthreads), chunks = ceil_div(items, chunk);
    team->body = body, team->arg = arg, team->items = items, team->chunk = chunk;
    set_limit(team, nthreads);
    uint64_t ticket = ((atomic_load(&team->ticket) >> 32) + 1) << 32 | (uint64_t)chunks << 16 | (uint64_t)nthreads;
    atomic_store(&team->ticket, ticket);
    wake_all(team);
    compute(team, ticket, 0, 0);
    for (long spins = 0; !all_done(team, ticket); spins++) {
        if (spins == HELP_AFTER) help(team, ticket, 0);
        if (spins < 4096)
            pause_core();
        else
            sched_yield(); /* a worker has lost its core in the middle of a chunk */
    }
}
