/* The norm of x·Wx for all steps at once, in place: forward and backward pass. Macros:
 *
 *   LAYER               1: layer norm; 0: batch norm
 *   BACKWARD            0: forward pass; 1: backward pass
 *   VECTOR              adjacent elements that are read at once
 *   CELL_VECTOR         the same for a row of c
 *   THREADS             upper bound of the threads of a block
 *   TEAM                layer norm: threads that process a row together
 *   VECTORS_PER_THREAD  layer norm: of a row; batch norm: rows, with one vector each
 *   IN_REGISTERS        1: these vectors stay in registers, so memory is read once; 0: they are read again
 *   RAGGED              1: there are lengths
 *   SEPARATE_GRADS      1: dh is not d
 *
 * In batch norm a block has some columns of a step. The forward pass leaves rows of ended sequences as they are;
 * the backward pass sets them to zero.
 */

struct Norms {
    i64 steps, batch, width, reverse, given, tiles; /* tiles: batch norm, blocks across a row */
    double eps;
    const i64 *lengths;
    const float *scale;
    const narrow *bias;
    float *mean, *var;    /* [N] in the order of the rows, or [T, width] in the order of processing */
    narrow *v;            /* [N, width]: x·Wx; out: normalised, scaled and shifted; backward pass: its gradient */
    const narrow *d, *dh; /* gradients of the normalised, scaled and shifted x·Wx and h·Wh */
    const float *gh;      /* [N, width]: h·Wh, normalised */
    float *partial_sums;  /* [·, 2, width]: of the gradients of both scales, to be added */
};

__device__ __forceinline__ float inverse(float var, double eps) { return rsqrtf(var + (float)eps); }

/* --- vectors of adjacent elements ---------------------------------------------------------------- */

#define EACH_ELEMENT _Pragma("unroll") for (int e = 0; e < VECTOR; e++)

#if IN_REGISTERS
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("unroll 1")
#endif

template <int N> struct alignas(N < 4 ? 4 * N : 16) Vector {
    float v[N];
    __device__ __forceinline__ float &operator[](int e) { return v[e]; }
    __device__ __forceinline__ float operator[](int e) const { return v[e]; }
};
typedef Vector<VECTOR> Floats;

template <int N> __device__ __forceinline__ Vector<N> get(const float *from) { return *(const Vector<N> *)from; }
template <int N> __device__ __forceinline__ void put(float *to, const Vector<N> &u) { *(Vector<N> *)to = u; }

/* The input's type, converted when it is used. */
#if TYPE && VECTOR > 1
struct alignas(2 * VECTOR) NarrowVector {
    u32 word[VECTOR / 2];
    __device__ __forceinline__ float operator[](int e) const { return widen((narrow)(word[e / 2] >> e % 2 * 16)); }
};
__device__ __forceinline__ void put_narrow(narrow *to, const Floats &u) {
    NarrowVector p;
#pragma unroll
    for (int w = 0; w < VECTOR / 2; w++) p.word[w] = pair(u[2 * w], u[2 * w + 1]);
    *(NarrowVector *)to = p;
}
#else
struct alignas(VECTOR * sizeof(narrow)) NarrowVector {
    narrow v[VECTOR];
    __device__ __forceinline__ float operator[](int e) const { return widen(v[e]); }
};
__device__ __forceinline__ void put_narrow(narrow *to, const Floats &u) {
    NarrowVector p;
    EACH_ELEMENT p.v[e] = narrowed(u[e]);
    *(NarrowVector *)to = p;
}
#endif

__device__ __forceinline__ NarrowVector get_narrow(const narrow *from) { return *(const NarrowVector *)from; }

/* vectors that a thread reads more than once, or long before their use */
template <class Number, class Elements> struct Cached {
    const Number *from;

#if IN_REGISTERS
    Elements held[VECTORS_PER_THREAD];
    __device__ __forceinline__ void read(int k, i64 at) { held[k] = *(const Elements *)(from + at); }
    __device__ __forceinline__ Elements get(int k, i64 at) const { return held[k]; }
#else
    __device__ __forceinline__ void read(int k, i64 at) {}
    __device__ __forceinline__ Elements get(int k, i64 at) const { return *(const Elements *)(from + at); }
#endif
};
typedef Cached<narrow, NarrowVector> CachedNarrow;
typedef Cached<float, Floats> CachedFloats;

/* --- layer norm ---------------------------------------------------------------------------------- */

#if LAYER
#define TEAMS (THREADS / TEAM)

#if IN_REGISTERS
#define VECTOR_COUNT VECTORS_PER_THREAD
#else
#define VECTOR_COUNT ((width + TEAM * VECTOR - 1) / (TEAM * VECTOR))
#endif
#define EACH_VECTOR \
    UNROLL for (int k = 0, j = lane * VECTOR; k < VECTOR_COUNT; k++, j += TEAM * VECTOR) \
        if (k < VECTOR_COUNT - 1 || j < width)

/* Sum over the threads of a row, for all of them. */
template <int N> __device__ __forceinline__ void sum_over_team(float (&v)[N]) {
#pragma unroll
    for (int far = 16; far; far /= 2)
#pragma unroll
        for (int i = 0; i < N; i++) v[i] += __shfl_xor_sync(~0u, v[i], far);
#if TEAM > 32
    __shared__ float sums[TEAM / 32][N];
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < N; i++) sums[threadIdx.x / 32][i] = v[i];
    __syncthreads();
    for (int i = 0; i < N; i++) {
        v[i] = 0.0f;
        for (int w = 0; w < TEAM / 32; w++) v[i] += sums[w][i];
    }
#endif
}

__device__ __forceinline__ bool ended(const Norms &n, i64 row) {
    return RAGGED && row / n.batch >= n.lengths[row % n.batch];
}

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS) forward(Norms n) {
    int lane = threadIdx.x % TEAM, width = (int)n.width;
    i64 row = (i64)blockIdx.x * TEAMS + threadIdx.x / TEAM, start = row * width;
    if (row >= n.steps * n.batch || ended(n, row)) return;
    CachedNarrow v = {n.v};
    EACH_VECTOR v.read(k, start + j);
    float sum[1] = {}, squares[1] = {}, share = 1.0f / width;
    EACH_VECTOR {
        NarrowVector x = v.get(k, start + j);
        EACH_ELEMENT sum[0] += x[e];
    }
    sum_over_team(sum);
    float mean = sum[0] * share;
    EACH_VECTOR {
        NarrowVector x = v.get(k, start + j);
        EACH_ELEMENT squares[0] += (x[e] - mean) * (x[e] - mean);
    }
    sum_over_team(squares);
    float var = squares[0] * share, rstd = inverse(var, n.eps);
    if (lane == 0) n.mean[row] = mean, n.var[row] = var;
    EACH_VECTOR {
        NarrowVector x = v.get(k, start + j), bias = get_narrow(n.bias + j);
        Floats scale = get<VECTOR>(n.scale + j), out;
        EACH_ELEMENT out[e] = (x[e] - mean) * rstd * scale[e] + bias[e];
        put_narrow(n.v + start + j, out);
    }
}
#else

#if IN_REGISTERS
/* Write the sums of a block's rows, added over its teams. */
__device__ __forceinline__ void store_sums(const float (&of)[VECTORS_PER_THREAD][VECTOR], float *to, int lane,
                                           int width) {
#if TEAM < THREADS
    __shared__ float sums[TEAMS][TEAM * VECTORS_PER_THREAD * VECTOR];
    __syncthreads();
    EACH_VECTOR EACH_ELEMENT sums[threadIdx.x / TEAM][j + e] = of[k][e];
    __syncthreads();
    for (int j = threadIdx.x; j < width; j += THREADS) {
        float sum = 0.0f;
        for (int team = 0; team < TEAMS; team++) sum += sums[team][j];
        to[j] = sum;
    }
#else
    EACH_VECTOR {
        Floats u;
        EACH_ELEMENT u[e] = of[k][e];
        put<VECTOR>(to + j, u);
    }
#endif
}
#endif

/* Row by row: each thread sums its columns, in registers or, without IN_REGISTERS, in `partial_sums`. */
extern "C" __global__ void __launch_bounds__(THREADS) backward(Norms n) {
    int lane = threadIdx.x % TEAM, width = (int)n.width;
    float *to_x = n.partial_sums + (i64)blockIdx.x * 2 * width, *to_h = to_x + width;
    Floats zero = {};

#if IN_REGISTERS
    float of_x[VECTORS_PER_THREAD][VECTOR] = {}, of_h[VECTORS_PER_THREAD][VECTOR] = {};
#else
    EACH_VECTOR put<VECTOR>(to_x + j, zero), put<VECTOR>(to_h + j, zero);
#endif
    float share = 1.0f / width;
    i64 rows = n.steps * n.batch;
    for (i64 row = (i64)blockIdx.x * TEAMS + threadIdx.x / TEAM; row < rows; row += (i64)gridDim.x * TEAMS) {
        i64 start = row * width;
        if (ended(n, row)) {
            EACH_VECTOR put_narrow(n.v + start + j, zero);
            continue;
        }
        float mean = n.mean[row], rstd = inverse(n.var[row], n.eps), sum[2] = {};
        CachedNarrow v = {n.v}, d = {n.d};
        CachedFloats h = {n.gh};
        EACH_VECTOR v.read(k, start + j), d.read(k, start + j), h.read(k, start + j);
        EACH_VECTOR {
            NarrowVector x = v.get(k, start + j), dx = d.get(k, start + j);
#if SEPARATE_GRADS
            NarrowVector dh = get_narrow(n.dh + start + j);
#else
            NarrowVector dh = dx;
#endif
            Floats scale = get<VECTOR>(n.scale + j), gh = h.get(k, start + j), hat;
            EACH_ELEMENT {
                hat[e] = (x[e] - mean) * rstd;
                sum[0] += dx[e] * scale[e];
                sum[1] += dx[e] * scale[e] * hat[e];
            }

#if IN_REGISTERS
            EACH_ELEMENT of_x[k][e] += dx[e] * hat[e], of_h[k][e] += dh[e] * gh[e];
#else
            Floats one = get<VECTOR>(to_x + j), two = get<VECTOR>(to_h + j);
            EACH_ELEMENT one[e] += dx[e] * hat[e], two[e] += dh[e] * gh[e];
            put<VECTOR>(to_x + j, one), put<VECTOR>(to_h + j, two);
#endif
        }
        sum_over_team(sum);
        float one = sum[0] * share, two = sum[1] * share;
        EACH_VECTOR {
            NarrowVector x = v.get(k, start + j), dx = d.get(k, start + j);
            Floats scale = get<VECTOR>(n.scale + j), out;
            EACH_ELEMENT out[e] = (dx[e] * scale[e] - one - (x[e] - mean) * rstd * two) * rstd;
            put_narrow(n.v + start + j, out);
        }
    }

#if IN_REGISTERS
    store_sums(of_x, to_x, lane, width);
    store_sums(of_h, to_h, lane, width);
#endif
}
#endif
#endif

/* --- columns ------------------------------------------------------------------------------------- */

/* Sum over the second dimension of a block of at most MOST threads, in a fixed order, for all of them. */
template <int MOST, int N> __device__ __forceinline__ void sum_down(float (&v)[N]) {
    __shared__ float sums[N][MOST + 8]; /* 8: avoids bank conflicts */
    int across = blockDim.x, thread = threadIdx.y * across + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) sums[i][thread] = v[i];
    __syncthreads();
    for (int j = thread; j < N * across; j += across * blockDim.y) {
        float sum = 0.0f, *column = &sums[j / across][j % across];
        for (int y = 0; y < blockDim.y; y++) sum += column[y * across];
        *column = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = sums[i][threadIdx.x];
}

/* --- batch norm ---------------------------------------------------------------------------------- */

#if !LAYER

#if IN_REGISTERS
#define EXAMPLES VECTORS_PER_THREAD
#else
#define EXAMPLES (((int)n.batch + (int)blockDim.y - 1) / (int)blockDim.y)
#endif
#define EACH_EXAMPLE \
    if (in) \
        UNROLL for (int k = 0, b = threadIdx.y; k < EXAMPLES; k++, b += blockDim.y) if (k < EXAMPLES - 1 || b < n.batch)

struct Place { /* VECTOR elements of one example at a processed step; past the end of a row they are not reordered */
    i64 at;
    bool alive;
};

__device__ __forceinline__ Place place(const Norms &n, i64 t, int b, int j) {
    i64 length = RAGGED ? n.lengths[b] : n.steps;
    bool alive = !RAGGED || t < length;
    return {((alive && n.reverse ? length - 1 - t : t) * n.batch + b) * n.width + j, alive};
}

/* 1 / the number of examples that have not ended. All threads of a block must call this. */
__device__ __forceinline__ float inverse_count(const Norms &n, i64 t) {
    if (!RAGGED) return 1.0f / n.batch;
    int count = 0;
    for (int first = 0; first < n.batch; first += blockDim.y) {
        int b = first + threadIdx.y;
        count += __syncthreads_count(b < n.batch && t < n.lengths[b]);
    }
    return 1.0f / max(count / (int)blockDim.x, 1);
}

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS) forward(Norms n) {
    u32 tiles = (u32)n.tiles;
    i64 t = blockIdx.x / tiles;
    int j = ((int)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * VECTOR;
    bool in = j < n.width;
    CachedNarrow v = {n.v};
    EACH_EXAMPLE {
        Place p = place(n, t, b, j);
        if (p.alive) v.read(k, p.at);
    }
    Floats mean = {}, var = {};
    if (n.given) {
        if (in) mean = get<VECTOR>(n.mean + t * n.width + j), var = get<VECTOR>(n.var + t * n.width + j);
    } else {
        float share = inverse_count(n, t);
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (!p.alive) continue;
            NarrowVector x = v.get(k, p.at);
            EACH_ELEMENT mean[e] += x[e];
        }
        sum_down<THREADS>(mean.v);
        EACH_ELEMENT mean[e] *= share;
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (!p.alive) continue;
            NarrowVector x = v.get(k, p.at);
            EACH_ELEMENT var[e] += (x[e] - mean[e]) * (x[e] - mean[e]);
        }
        sum_down<THREADS>(var.v);
        EACH_ELEMENT var[e] *= share;
        if (in && threadIdx.y == 0)
            put<VECTOR>(n.mean + t * n.width + j, mean), put<VECTOR>(n.var + t * n.width + j, var);
    }
    if (!in) return;
    Floats scale = get<VECTOR>(n.scale + j), rstd;
    NarrowVector bias = get_narrow(n.bias + j);
    EACH_ELEMENT rstd[e] = inverse(var[e], n.eps);
    EACH_EXAMPLE {
        Place p = place(n, t, b, j);
        if (!p.alive) continue;
        NarrowVector x = v.get(k, p.at);
        Floats out;
        EACH_ELEMENT out[e] = (x[e] - mean[e]) * rstd[e] * scale[e] + bias[e];
        put_narrow(n.v + p.at, out);
    }
}
#else

/* Step by step: each thread sums its columns. */
extern "C" __global__ void __launch_bounds__(THREADS) backward(Norms n) {
    u32 tiles = (u32)n.tiles;
    i64 first = blockIdx.x / tiles, count = gridDim.x / tiles;
    int j = ((int)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * VECTOR;
    bool in = j < n.width;
    float total[2 * VECTOR] = {}; /* gradients of both scales */
    Floats scale = {};
    if (in) scale = get<VECTOR>(n.scale + j);
    for (i64 t = first; t < n.steps; t += count) {
        CachedNarrow v = {n.v}, d = {n.d};
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (p.alive) v.read(k, p.at), d.read(k, p.at);
        }
        Floats mean = {}, rstd = {};
        if (in) mean = get<VECTOR>(n.mean + t * n.width + j), rstd = get<VECTOR>(n.var + t * n.width + j);
        EACH_ELEMENT rstd[e] = inverse(rstd[e], n.eps);
        float sum[2 * VECTOR] = {};
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (!p.alive) continue;
            NarrowVector x = v.get(k, p.at), dx = d.get(k, p.at);
#if SEPARATE_GRADS
            NarrowVector dh = get_narrow(n.dh + p.at);
#else
            NarrowVector dh = dx;
#endif
            Floats gh = get<VECTOR>(n.gh + p.at);
            EACH_ELEMENT {
                sum[e] += dx[e];
                sum[VECTOR + e] += dx[e] * ((x[e] - mean[e]) * rstd[e]);
                total[VECTOR + e] += dh[e] * gh[e];
            }
        }
        EACH_ELEMENT total[e] += sum[VECTOR + e];
        if (!n.given) {
            float share = inverse_count(n, t);
            sum_down<THREADS>(sum);
            EACH_ELEMENT sum[e] *= share, sum[VECTOR + e] *= share;
        } else {
            EACH_ELEMENT sum[e] = sum[VECTOR + e] = 0.0f;
        }
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            Floats out = {};
            if (p.alive) {
                NarrowVector x = v.get(k, p.at), dx = d.get(k, p.at);
                EACH_ELEMENT out[e] = (dx[e] - sum[e] - (x[e] - mean[e]) * rstd[e] * sum[VECTOR + e]) * scale[e]
                    * rstd[e];
            }
            put_narrow(n.v + p.at, out);
        }
    }
    sum_down<THREADS>(total);
    if (!in || threadIdx.y) return;
    float *to = n.partial_sums + first * 2 * n.width + j;
    EACH_ELEMENT to[e] = total[e], to[n.width + e] = total[VECTOR + e];
}
#endif
#endif

/* --- sums over all rows --------------------------------------------------------------------------- */

#if BACKWARD
struct Sums {
    const float *d, *hat; /* [rows, width] */
    float *partial_sums;  /* [count, 2, width]: sums of d · hat and of d */
    i64 rows, width, count;
    float *first, *second; /* [width] */
};

/* A block has some columns of some rows; a thread has CELL_VECTOR columns. */
extern "C" __global__ void __launch_bounds__(256) sum_products(Sums s) {
    u32 tiles = gridDim.x / (u32)s.count;
    i64 index = blockIdx.x / tiles, j = (i64)(blockIdx.x % tiles * blockDim.x + threadIdx.x) * CELL_VECTOR;
    bool in = j < s.width;
    float sum[2 * CELL_VECTOR] = {};
    if (in)
#pragma unroll 4
        for (i64 row = index * blockDim.y + threadIdx.y; row < s.rows; row += s.count * blockDim.y) {
            Vector<CELL_VECTOR> d = get<CELL_VECTOR>(s.d + row * s.width + j),
                hat = get<CELL_VECTOR>(s.hat + row * s.width + j);
#pragma unroll
            for (int e = 0; e < CELL_VECTOR; e++) sum[e] += d[e] * hat[e], sum[CELL_VECTOR + e] += d[e];
        }
    sum_down<256>(sum);
    if (!in || threadIdx.y) return;
    float *to = s.partial_sums + index * 2 * s.width + j;
#pragma unroll
    for (int e = 0; e < CELL_VECTOR; e++) to[e] = sum[e], to[s.width + e] = sum[CELL_VECTOR + e];
}

/* Add the partial sums of both: one column for each thread, and partial sums over the second dimension of a block. */
extern "C" __global__ void __launch_bounds__(256) finish(Sums gates, Sums cell) {
    i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    bool second = j >= 2 * gates.width;
    if (second) j -= 2 * gates.width;
    const float *partial_sums = second ? cell.partial_sums : gates.partial_sums;
    i64 width = second ? cell.width : gates.width, count = second ? cell.count : gates.count;
    bool in = j < 2 * width;
    float sum[1] = {};
    if (in)
#pragma unroll 8
        for (i64 p = threadIdx.y; p < count; p += blockDim.y) sum[0] += partial_sums[p * 2 * width + j];
    sum_down<256>(sum);
    if (!in || threadIdx.y) return;
    float *to = j < width ? (second ? cell.first : gates.first) : (second ? cell.second : gates.second);
    to[j < width ? j : j - width] = sum[0];
}
#endif
