/* What a kernel finds on a GPU, for the CPU: see emulator.py. */
#include <algorithm>
#include <math.h>
#include <memory>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static /* blocks that have such memory run one after another */

/* With -fsanitize=thread, ThreadSanitizer takes each thread of a kernel for one. What UNSEEN functions read and write
 * is the emulator's own: they tell ThreadSanitizer what the instruction means. */
#ifdef __SANITIZE_THREAD__
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void *);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_acquire(void *);
void __tsan_release(void *);
}
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#define RACES 1
#else
static inline void *__tsan_get_current_fiber() { return nullptr; }
static inline void *__tsan_create_fiber(unsigned) { return nullptr; }
static inline void __tsan_destroy_fiber(void *) {}
static inline void __tsan_switch_to_fiber(void *, unsigned) {}
static inline void __tsan_acquire(void *) {}
static inline void __tsan_release(void *) {}
#define UNSEEN
#define RACES 0
#endif

struct Dim {
    int x, y, z;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;
struct __align__(8) uint2 {
    uint32_t x, y;
};
struct __align__(16) uint4 {
    uint32_t x, y, z, w;
};
struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {
typedef uint32_t u32;
typedef uint16_t u16;

/* --- fibers ------------------------------------------------------------------------------------- */

const int STACK = 128 * 1024, PATIENCE = 1 << 16; /* bytes of a fiber, and turns after which none will end */

struct Barrier {
    int wanted = 0, here = 0, turn = 0;
    char order[2]; /* of memory before and after it, in even and odd turns */
};
struct Warp {
    Barrier barrier;
    u32 word[2][32], a[2][32][4], b[2][32][2];
};
struct Cluster {
    Barrier barrier;
    int first; /* of its blocks */
};
struct Block {
    Barrier barrier, named[16];
    Cluster *cluster;
    std::vector<char> shared;
    int votes[2] = {};
};
struct Fiber {
    ucontext_t context; /* its first turn begins there, every other one where it gave way */
    jmp_buf place;
    Dim thread, block;
    Warp *warp;
    Block *home;
    int lane, turns = 0, votes = 0, arrived = -1;
    bool begun = false, done = false;
    void *for_sanitizer;
    void *flags[32]; /* read since the last fence */
    int flag_count = 0;
};
static Fiber *self;
static jmp_buf scheduler;
static ucontext_t scheduler_context;
static void *sanitizer_of_scheduler;
static char finished; /* what threads did before they ended */
static bool variables_in_shared; /* which blocks use in turn */
static std::vector<Block> *blocks;
static long events; /* something went on */
static void (*body)(void *);
static void *body_of;

static u32 chance() { /* the same each time */
    static u32 state = 1;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

/* By jumps: swapcontext asks the system for the mask of signals each time, which took half of the time.
 * ThreadSanitizer does not know jumps to another stack. */
static UNSEEN __attribute__((noinline)) void give_way() {
    if (RACES) {
        __tsan_switch_to_fiber(sanitizer_of_scheduler, 1);
        swapcontext(&self->context, &scheduler_context);
    } else if (!_setjmp(self->place)) {
        _longjmp(scheduler, 1);
    }
}
static UNSEEN __attribute__((noinline)) void give_turn() {
    bool begun = self->begun;
    self->begun = true;
    if (RACES) {
        __tsan_switch_to_fiber(self->for_sanitizer, begun); /* the first time it knows what came before the launch */
        swapcontext(&scheduler_context, &self->context);
        return;
    }
    if (_setjmp(scheduler)) return;
    if (begun) _longjmp(self->place, 1);
    setcontext(&self->context);
}
/* A rendezvous orders memory, unless it is one of a shuffle or a product. */
static UNSEEN int arrive_at(Barrier &b, bool orders = true) {
    int turn = b.turn;
    if (orders) __tsan_release(&b.order[turn & 1]);
    if (++b.here == b.wanted) b.here = 0, b.turn++, events++;
    return turn;
}
static UNSEEN void wait_at(Barrier &b, int turn, bool orders = true) {
    while (b.turn == turn) give_way();
    if (orders) __tsan_acquire(&b.order[turn & 1]);
}
static UNSEEN void meet(Barrier &b, bool orders = true) { wait_at(b, arrive_at(b, orders), orders); }
static UNSEEN void leave(Barrier &b) {
    b.wanted--;
    if (b.wanted > 0 && b.here == b.wanted) b.here = 0, b.turn++, events++;
}
static UNSEEN void begin() {
    body(body_of);
    self->done = true, events++;
    leave(self->warp->barrier), leave(self->home->barrier), leave(self->home->cluster->barrier);
    __tsan_release(&finished);
    if (RACES) {
        __tsan_switch_to_fiber(sanitizer_of_scheduler, 1);
        setcontext(&scheduler_context);
    }
    _longjmp(scheduler, 1);
}
static char *shared() { return self->home->shared.data(); }
static bool misaligned; /* whether something was read or written where a GPU would not */
static bool outside;    /* whether an index was past the end of its array */

/* Blocks that run side by side. */
struct Group {
    std::vector<Block> all;
    std::vector<Warp> warps;
    std::vector<Fiber> fibers;
    std::vector<Cluster> clusters;
    Group(int blocks, int warps, int threads, int side)
        : all(blocks), warps(blocks * warps), fibers(blocks * threads), clusters(blocks / side) {}
};

template <class Body>
static UNSEEN int run(int across, int down, int x, int y, int size, int together, int side, Body one) {
    body = [](void *of) { (*(Body *)of)(); };
    body_of = &one;
    gridDim = {across, down, 1}, blockDim = {x, y, 1}, misaligned = outside = false;
    const int threads = x * y, warps = (threads + 31) / 32;
    sanitizer_of_scheduler = __tsan_get_current_fiber();
    std::unique_ptr<char[]> stacks; /* not touched before it is needed */
    for (int first = 0; first < across * down; first += together) {
        std::unique_ptr<Group> owned(new Group(together, warps, threads, side));
        Group &group = *owned;
        if (RACES) owned.release(), stacks.release(); /* ThreadSanitizer must not see that memory is used again */
        if (!stacks) stacks.reset(new char[(size_t)STACK * together * threads]);
        blocks = &group.all;
        for (int b = 0; b < together; b++) {
            Block &block = group.all[b];
            block.cluster = &group.clusters[b / side];
            block.cluster->first = b / side * side, block.cluster->barrier.wanted = side * threads;
            block.barrier.wanted = threads;
            block.shared.assign(size + 16, (char)0xFF); /* not a number before it is written */
            for (int t = 0; t < threads; t++) {
                Fiber &f = group.fibers[b * threads + t];
                f.thread = {t % x, t / x, 0}, f.block = {(first + b) % across, (first + b) / across, 0};
                f.home = &block, f.warp = &group.warps[b * warps + t / 32], f.lane = t % 32;
                f.warp->barrier.wanted++;
                f.for_sanitizer = __tsan_create_fiber(0);
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = stacks.get() + (size_t)STACK * (b * threads + t);
                f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
                makecontext(&f.context, begin, 0);
            }
        }
        int idle = 0, turns = 0;
        for (bool going = true; going; turns++) {
            long before = events;
            going = false;
            for (int i = 0; i < together * threads; i++) {
                /* Blocks run at different speeds: now one gets ahead, now another. */
                if (i % threads == 0 && together > 1 && chance() % 2) {
                    for (int t = 0; t < threads; t++) going |= !group.fibers[i + t].done;
                    i += threads - 1;
                    continue;
                }
                Fiber &f = group.fibers[i];
                if (f.done) continue;
                self = &f, threadIdx = f.thread, blockIdx = f.block;
                give_turn();
                going |= !f.done;
            }
            idle = events == before ? idle + 1 : 0;
            if (idle == 100 || turns == PATIENCE) return 1;
        }
        for (Fiber &f : group.fibers) __tsan_destroy_fiber(f.for_sanitizer);
        if (variables_in_shared) __tsan_acquire(&finished);
    }
    __tsan_acquire(&finished);
    return misaligned ? 2 : outside ? 3 : 0;
}

/* --- a warp --------------------------------------------------------------------------------------- */

template <class T>
static u32 as_word(T v) {
    u32 out;
    static_assert(sizeof(T) == 4, "a word");
    memcpy(&out, &v, 4);
    return out;
}
template <class T>
static T from_word(u32 v) {
    T out;
    memcpy(&out, &v, 4);
    return out;
}
static UNSEEN u32 *exchange(u32 v) { /* the words of all lanes; two buffers take turns */
    int turn = self->turns++ & 1;
    self->warp->word[turn][self->lane] = v;
    meet(self->warp->barrier, false);
    return self->warp->word[turn];
}

static float half_at(u16 v) {
    u32 sign = (v & 0x8000u) << 16, exponent = v >> 10 & 31, rest = v & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)rest, -24);
    return from_word<float>(sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | rest << 13);
}
static u16 half_of(float v) { /* rounded to the nearest, to even between two */
    u16 sign = signbit(v) ? 0x8000 : 0;
    float size = fabsf(v);
    if (isnan(v)) return 0x7FFF;
    if (size == 0 || size >= 65520.0f) return size == 0 ? sign : sign | 0x7C00;
    int exponent;
    frexpf(size, &exponent);
    if (exponent < -13) exponent = -13;
    int steps = (int)nearbyintf(ldexpf(size, 11 - exponent)); /* of the last place */
    return sign + (u16)(steps + (exponent + 13) * 1024);
}
static u16 bf16_of(float v) {
    u32 word = as_word(v);
    return isnan(v) ? 0x7FFF : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}
static float bf16_at(u16 v) { return from_word<float>((u32)v << 16); }

static UNSEEN void mma(const char *how, float *sum, const u32 *a, u32 b0, u32 b1) {
    const bool tf32 = strstr(how, "tf32"), brain = strstr(how, "bf16");
    int turn = self->turns++ & 1, g = self->lane / 4, j = self->lane % 4;
    Warp &w = *self->warp;
    memcpy(w.a[turn][self->lane], a, 16);
    w.b[turn][self->lane][0] = b0, w.b[turn][self->lane][1] = b1;
    meet(w.barrier, false);
    for (int n = 0; n < 4; n++) {
        int row = n / 2, column = 2 * j + n % 2; /* row: the upper or the lower eight */
        double total = sum[n];
        for (int k = 0; k < 8; k++) { /* a word of the depth */
            u32 left = w.a[turn][g * 4 + k % 4][k / 4 * 2 + row], right = w.b[turn][column * 4 + k % 4][k / 4];
            if (tf32) {
                total += (double)from_word<float>(left & ~0x1FFFu) * from_word<float>(right & ~0x1FFFu);
            } else {
                for (int i = 0; i < 32; i += 16) {
                    u16 one = left >> i, two = right >> i;
                    total += (double)(brain ? bf16_at(one) : half_at(one)) * (brain ? bf16_at(two) : half_at(two));
                }
            }
        }
        sum[n] = (float)total;
    }
}

/* Of a warpgroup each warp has 16 rows of a for itself; b lies in shared memory, both as they are described. */
static float number_at(bool brain, uint64_t matrix, int row, int k) {
    u32 at = (u32)(matrix & 0x3FFF) << 4, far = (u32)(matrix >> 16 & 0x3FFF) << 4, down = (u32)(matrix >> 32 & 0x3FFF) << 4;
    u16 v = *(u16 *)(self->home->shared.data() + at + k / 8 * far + row / 8 * down + row % 8 * 16 + k % 8 * 2);
    return brain ? bf16_at(v) : half_at(v);
}
template <class Left>
static void wgmma_of(bool brain, float *sum, uint64_t b, Left left) {
    for (int n = 0; n < 32; n++) {
        int row = n % 4 / 2 * 8 + self->lane / 4, column = n / 4 * 8 + self->lane % 4 * 2 + n % 2;
        double total = sum[n];
        for (int k = 0; k < 16; k++) total += (double)left(row, k) * number_at(brain, b, column, k);
        sum[n] = (float)total;
    }
}
static UNSEEN void show_warp(int turn, const u32 *a) {
    memcpy(self->warp->a[turn][self->lane], a, 16);
    meet(self->warp->barrier, false);
}
static UNSEEN u16 shown(int turn, int row, int k) {
    return self->warp->a[turn][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
}
static void wgmma(bool brain, float *sum, const u32 *a, uint64_t b) {
    int turn = self->turns++ & 1;
    show_warp(turn, a);
    wgmma_of(brain, sum, b, [&](int row, int k) {
        u16 v = shown(turn, row, k);
        return brain ? bf16_at(v) : half_at(v);
    });
}
static void wgmma(bool brain, float *sum, uint64_t a, uint64_t b) {
    meet(self->warp->barrier, false);
    int first = self->thread.x / 32 % 4 * 16;
    wgmma_of(brain, sum, b, [&](int row, int k) { return number_at(brain, a, first + row, k); });
}

/* --- instructions --------------------------------------------------------------------------------- */

static void rsqrt_approx_ftz_f32(float &to, float v) { to = 1.0f / sqrtf(v); }
static void tanh_approx_f32(float &to, float v) { to = tanhf(v); }
static void ex2_approx_ftz_f32(float &to, float v) { to = exp2f(v); }
static void rcp_approx_ftz_f32(float &to, float v) { to = 1.0f / v; }
static void ld_global_u8(u32 &to, const void *from) { to = *(const unsigned char *)from; }
static void ld_global_u16(u32 &to, const void *from) { to = *(const u16 *)from; }
static void ld_global_u32(u32 &to, const void *from) { to = *(const u32 *)from; }
static void ld_global_v2_u32(u32 &x, u32 &y, const void *from) { x = ((const u32 *)from)[0], y = ((const u32 *)from)[1]; }
static UNSEEN void remember_flag(void *flag) {
    Fiber &f = *self;
    for (int i = 0; i < f.flag_count; i++)
        if (f.flags[i] == flag) return;
    if (f.flag_count == 32) memmove(f.flags, f.flags + 1, 31 * sizeof(void *)), f.flag_count = 31;
    f.flags[f.flag_count++] = flag;
}
static u32 relaxed_load(const void *from) { return __atomic_load_n((const u32 *)from, __ATOMIC_RELAXED); }
static void relaxed_store(void *to, u32 v) { __atomic_store_n((u32 *)to, v, __ATOMIC_RELAXED); }
static void ld_relaxed_gpu_global_u32(u32 &to, const void *from) {
    to = relaxed_load(from);
    if (RACES) remember_flag((void *)from);
}
static void st_relaxed_gpu_global_u64(void *to, u32 low, u32 high) { relaxed_store(to, low), relaxed_store((u32 *)to + 1, high); }
static void st_relaxed_gpu_global_u32(void *to, u32 v) { relaxed_store(to, v); }
static void ld_global_v4_u32(u32 &x, u32 &y, u32 &z, u32 &w, const void *from) {
    const uint4 v = *(const uint4 *)from;
    x = v.x, y = v.y, z = v.z, w = v.w;
}
static void prefetch_global_L2(const void *) {}
static void cvt_rna_tf32_f32(u32 &to, float v) { to = (as_word(v) + 0x1000) & ~0x1FFFu; }
static void cvt_rn_bf16_f32(u16 &to, float v) { to = bf16_of(v); }
static void cvt_rn_f16_f32(u16 &to, float v) { to = half_of(v); }
static void cvt_f32_f16(float &to, u16 v) { to = half_at(v); }
static void cvt_rn_bf16x2_f32(u32 &to, float high, float low) { to = bf16_of(low) | (u32)bf16_of(high) << 16; }
static void cvt_rn_f16x2_f32(u32 &to, float high, float low) { to = half_of(low) | (u32)half_of(high) << 16; }
static void barrier_cluster_arrive_release_aligned() { self->arrived = arrive_at(self->home->cluster->barrier); }
static void barrier_cluster_wait_acquire_aligned() { wait_at(self->home->cluster->barrier, self->arrived); }

static UNSEEN void redux_sync_max_u32(u32 &to, u32 v) {
    u32 *all = exchange(v);
    to = *std::max_element(all, all + 32);
}
static void lop3_b32(u32 &wrong, u32 v, u32 tag) { wrong |= v ^ tag; } /* 0xF6, which is all that is used */

/* Copies that are on their way: here they have arrived. What they read may be written at the same time: the
 * exchange of the hidden state finds out by its tags. */
static void cp_async_cg_shared_global(u32 to, const void *from) {
    for (int i = 0; i < 4; i++) ((u32 *)(shared() + to))[i] = relaxed_load((const u32 *)from + i);
}
static void cp_async_commit_group() {}
static void cp_async_wait_group(int) {}
static void ld_shared_v2_u32(u32 &x, u32 &y, u32 from) { x = *(u32 *)(shared() + from), y = *(u32 *)(shared() + from + 4); }
static void ld_shared_v4_u32(u32 &x, u32 &y, u32 &z, u32 &w, u32 from) {
    ld_shared_v2_u32(x, y, from), ld_shared_v2_u32(z, w, from + 8);
}
static void ld_shared_f32(float &to, u32 from) { to = *(float *)(shared() + from); }
static u32 shared_word(u32 from) { return *(u32 *)(shared() + from); }
static UNSEEN void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32 &m0, u32 &m1, u32 &m2, u32 &m3, u32 from) {
    u32 *rows = exchange(from), *to[4] = {&m0, &m1, &m2, &m3};
    for (int i = 0; i < 4; i++) *to[i] = shared_word(rows[i * 8 + self->lane / 4] + self->lane % 4 * 4);
}

/* An address in shared memory is an offset; that of another block of the cluster has the block's number before it. */
static void mapa_shared_cluster_u32(u32 &to, u32 own, int block) { to = own | (u32)(self->home->cluster->first + block) << 24; }
static u32 *in_cluster(u32 at) { return (u32 *)((*blocks)[at >> 24].shared.data() + (at & 0xFFFFFF)); }
static void st_shared_cluster_u32(u32 at, u32 x) { *in_cluster(at) = x; }
static void st_shared_cluster_v2_u32(u32 at, u32 x, u32 y) { in_cluster(at)[0] = x, in_cluster(at)[1] = y; }
static void st_shared_cluster_v4_u32(u32 at, u32 x, u32 y, u32 z, u32 w) {
    st_shared_cluster_v2_u32(at, x, y), st_shared_cluster_v2_u32(at + 8, z, w);
}

/* Barriers in shared memory, which count arrivals and bytes. */
struct Counter {
    u16 phase : 1, wanted : 15, left;
    int32_t bytes;
};
static_assert(sizeof(Counter) == 8, "as on a GPU");
static Counter &counter(u32 at) { return *(Counter *)(shared() + at); }
static UNSEEN void count(Counter &c, int arrivals, int bytes) {
    __tsan_release(&c);
    c.left -= arrivals, c.bytes += bytes;
    if (c.left == 0 && c.bytes == 0) c.phase ^= 1, c.left = c.wanted, events++;
}
static void mbarrier_init_shared_cta_b64(u32 at, u32 wanted) { counter(at) = {0, (u16)wanted, (u16)wanted, 0}; }
static void mbarrier_arrive_expect_tx_shared_cta_b64(u32 at, u32 bytes) { count(counter(at), 1, bytes); }
static void mbarrier_arrive_shared_cta_b64(u32 at) { count(counter(at), 1, 0); }
static UNSEEN void mbarrier_try_wait_parity_shared_cta_b64(u32 &done, u32 at, u32 phase) {
    done = counter(at).phase != phase;
    if (done)
        __tsan_acquire(&counter(at));
    else
        give_way();
}
static void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, const void *from, u32 bytes, u32 at) {
    if ((to | (size_t)from | bytes) % 16) misaligned = true;
    memcpy(shared() + to, from, bytes);
    count(counter(at), 0, -(int)bytes);
}
static void st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_u32(u32 to, u32 x, u32 at) {
    st_shared_cluster_u32(to, x), count(*(Counter *)in_cluster(at), 0, -4);
}
static void st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_v2_u32(u32 to, u32 x, u32 y, u32 at) {
    st_shared_cluster_v2_u32(to, x, y), count(*(Counter *)in_cluster(at), 0, -8);
}
static void st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_v4_u32(u32 to, u32 x, u32 y, u32 z, u32 w, u32 at) {
    st_shared_cluster_v4_u32(to, x, y, z, w), count(*(Counter *)in_cluster(at), 0, -16);
}
static void fence_mbarrier_init_release_cluster() {}
static UNSEEN void bar_sync(int which, int threads) {
    self->home->named[which].wanted = threads;
    meet(self->home->named[which]);
}
static UNSEEN void bar_arrive(int which, int threads) {
    self->home->named[which].wanted = threads;
    arrive_at(self->home->named[which]);
}
static UNSEEN void st_release_gpu_global_u32(void *to, u32 v) {
    __tsan_release(to);
    relaxed_store(to, v), events++;
}
static void fence_proxy_async() {}
static UNSEEN void fence_acq_rel_gpu() {
    for (int i = 0; i < self->flag_count; i++) __tsan_acquire(self->flags[i]);
    self->flag_count = 0;
}
static void setmaxnreg_dec_sync_aligned_u32(int) {}
static void setmaxnreg_inc_sync_aligned_u32(int) {}
static void wgmma_fence_sync_aligned() {}
static void wgmma_commit_group_sync_aligned() {}
static void wgmma_wait_group_sync_aligned(int) {}
} // namespace emulated

/* What the compiler calls (-fsanitize=alignment) where an address does not fit what is read or written there. */
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) { emulated::misaligned = true; }
/* The same (-fsanitize=bounds) where an index is past the end of an array. */
extern "C" void __ubsan_handle_out_of_bounds(void *, void *) { emulated::outside = true; }

static inline size_t __cvta_generic_to_shared(const void *at) { return (const char *)at - emulated::shared(); }
static inline float __uint_as_float(uint32_t v) { return emulated::from_word<float>(v); }
static inline uint32_t __float_as_uint(float v) { return emulated::as_word(v); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
static inline void sincospif(float v, float *sine, float *cosine) { *sine = sin(M_PI * v), *cosine = cos(M_PI * v); }
#define __expf expf
using std::max;
using std::min;
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
static inline int __ffs(uint32_t v) { return __builtin_ffs(v); }
static inline int __popc(uint32_t v) { return __builtin_popcount(v); }
template <class T>
static UNSEEN T __shfl_sync(uint32_t, T v, int from) {
    return emulated::from_word<T>(emulated::exchange(emulated::as_word(v))[from & 31]);
}
template <class T>
static T __shfl_xor_sync(uint32_t mask, T v, int far) {
    return __shfl_sync(mask, v, emulated::self->lane ^ far);
}
template <class T>
static T __shfl_down_sync(uint32_t mask, T v, int far) {
    int from = emulated::self->lane + far;
    return __shfl_sync(mask, v, from < 32 ? from : emulated::self->lane);
}
static UNSEEN inline uint32_t __ballot_sync(uint32_t, bool v) {
    uint32_t *all = emulated::exchange(v), out = 0;
    for (int i = 0; i < 32; i++) out |= all[i] << i;
    return out;
}
static inline bool __any_sync(uint32_t mask, bool v) { return __ballot_sync(mask, v); }
static inline void __syncwarp() { emulated::meet(emulated::self->warp->barrier); }
static inline void __syncthreads() { emulated::meet(emulated::self->home->barrier); }
static UNSEEN inline int __syncthreads_count(int v) {
    int turn = emulated::self->votes++ & 1;
    auto &home = *emulated::self->home;
    home.votes[turn] += v != 0;
    __syncthreads();
    int out = home.votes[turn];
    __syncthreads();
    home.votes[turn] = 0;
    return out;
}
