/* The norm of x·Wx for all steps at once: moments, normalised in place; and the way back.
 *
 * Compiled with V (neighbouring numbers read at once), VC (the same for a row of c), THREADS (at least those of a block),
 * LAYER, BACK, ENDS (there are lengths) and APART (dh is not d). Layer norm: TEAM threads have a row, each R vectors of
 * it. Batch norm: a block has some columns of a step, a thread one vector of R rows. With HELD these stay in registers,
 * so that everything is read once; without, they are read again, mostly from the cache. Rows of ended sequences are left
 * as they are, and zero on the way back.
 */

struct Norms {
    i64 steps, batch, width, reverse, given, tiles; /* tiles: batch norm, blocks across a row */
    double eps;
    const i64 *lengths;
    const float *scale;
    const narrow *bias;
    float *mean, *var;    /* [N] as the rows lie, or [T, width] in the order of processing */
    narrow *v;            /* [N, width]: x·Wx; out: normalised, scaled and shifted; backwards: its derivative */
    const narrow *d, *dh; /* of both parts of the gates, normalised, scaled and shifted */
    const float *gh;      /* [N, width]: h·Wh, normalised */
    float *parts;         /* [·, 2, width]: of the scales of x and h, to be added up */
};

__device__ __forceinline__ float inverse(float var, double eps) { return rsqrtf(var + (float)eps); }

/* --- neighbouring numbers ------------------------------------------------------------------------ */

#define EACH _Pragma("unroll") for (int e = 0; e < V; e++)
#if HELD
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("unroll 1")
#endif

template <int N> struct alignas(N < 4 ? 4 * N : 16) Wide {
    float v[N];
    __device__ __forceinline__ float &operator[](int e) { return v[e]; }
    __device__ __forceinline__ float operator[](int e) const { return v[e]; }
};
typedef Wide<V> Units;

template <int N> __device__ __forceinline__ Wide<N> get(const float *from) { return *(const Wide<N> *)from; }
template <int N> __device__ __forceinline__ void put(float *to, const Wide<N> &u) { *(Wide<N> *)to = u; }

/* As they lie in memory, to be widened when they are used. */
#if TYPE && V > 1
struct alignas(2 * V) Packed {
    u32 word[V / 2];
    __device__ __forceinline__ float operator[](int e) const { return widen((narrow)(word[e / 2] >> e % 2 * 16)); }
};
__device__ __forceinline__ void put_narrow(narrow *to, const Units &u) {
    Packed p;
#pragma unroll
    for (int w = 0; w < V / 2; w++) p.word[w] = pair(u[2 * w], u[2 * w + 1]);
    *(Packed *)to = p;
}
#else
struct alignas(V * sizeof(narrow)) Packed {
    narrow v[V];
    __device__ __forceinline__ float operator[](int e) const { return widen(v[e]); }
};
__device__ __forceinline__ void put_narrow(narrow *to, const Units &u) {
    Packed p;
    EACH p.v[e] = narrowed(u[e]);
    *(Packed *)to = p;
}
#endif

__device__ __forceinline__ Packed get_narrow(const narrow *from) { return *(const Packed *)from; }

template <class Number, class Vector> struct Mine { /* what a thread reads more than once, or well before it is used */
    const Number *from;
#if HELD
    Vector kept[R];
    __device__ __forceinline__ void take(int k, i64 at) { kept[k] = *(const Vector *)(from + at); }
    __device__ __forceinline__ Vector get(int k, i64 at) const { return kept[k]; }
#else
    __device__ __forceinline__ void take(int k, i64 at) {}
    __device__ __forceinline__ Vector get(int k, i64 at) const { return *(const Vector *)(from + at); }
#endif
};
typedef Mine<narrow, Packed> Narrows;
typedef Mine<float, Units> Wides;

/* --- layer norm ---------------------------------------------------------------------------------- */

#if LAYER
#define TEAMS (THREADS / TEAM)
#if HELD
#define VECTORS R
#else
#define VECTORS ((width + TEAM * V - 1) / (TEAM * V))
#endif
#define EACH_VECTOR \
    UNROLL for (int k = 0, j = lane * V; k < VECTORS; k++, j += TEAM * V) if (k < VECTORS - 1 || j < width)

/* Sums over the threads of a row, for all of them. */
template <int N> __device__ __forceinline__ void add_up(float (&v)[N]) {
#pragma unroll
    for (int far = 16; far; far /= 2)
#pragma unroll
        for (int i = 0; i < N; i++) v[i] += __shfl_xor_sync(~0u, v[i], far);
#if TEAM > 32
    __shared__ float part[TEAM / 32][N];
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < N; i++) part[threadIdx.x / 32][i] = v[i];
    __syncthreads();
    for (int i = 0; i < N; i++) {
        v[i] = 0.0f;
        for (int w = 0; w < TEAM / 32; w++) v[i] += part[w][i];
    }
#endif
}

__device__ __forceinline__ bool ended(const Norms &n, i64 row) {
    return ENDS && row / n.batch >= n.lengths[row % n.batch];
}

#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS) forward(Norms n) {
    int lane = threadIdx.x % TEAM, width = (int)n.width;
    i64 row = (i64)blockIdx.x * TEAMS + threadIdx.x / TEAM, start = row * width;
    if (row >= n.steps * n.batch || ended(n, row)) return;
    Narrows v = {n.v};
    EACH_VECTOR v.take(k, start + j);
    float sum[1] = {}, squares[1] = {}, share = 1.0f / width;
    EACH_VECTOR {
        Packed x = v.get(k, start + j);
        EACH sum[0] += x[e];
    }
    add_up(sum);
    float mean = sum[0] * share;
    EACH_VECTOR {
        Packed x = v.get(k, start + j);
        EACH squares[0] += (x[e] - mean) * (x[e] - mean);
    }
    add_up(squares);
    float var = squares[0] * share, rstd = inverse(var, n.eps);
    if (lane == 0) n.mean[row] = mean, n.var[row] = var;
    EACH_VECTOR {
        Packed x = v.get(k, start + j), bias = get_narrow(n.bias + j);
        Units scale = get<V>(n.scale + j), out;
        EACH out[e] = (x[e] - mean) * rstd * scale[e] + bias[e];
        put_narrow(n.v + start + j, out);
    }
}
#else

#if HELD
/* The sums of a block's rows, each thread's columns: added over its teams. */
__device__ __forceinline__ void leave(const float (&of)[R][V], float *to, int lane, int width) {
#if TEAM < THREADS
    __shared__ float part[TEAMS][TEAM * R * V];
    __syncthreads();
    EACH_VECTOR EACH part[threadIdx.x / TEAM][j + e] = of[k][e];
    __syncthreads();
    for (int j = threadIdx.x; j < width; j += THREADS) {
        float sum = 0.0f;
        for (int team = 0; team < TEAMS; team++) sum += part[team][j];
        to[j] = sum;
    }
#else
    EACH_VECTOR {
        Units u;
        EACH u[e] = of[k][e];
        put<V>(to + j, u);
    }
#endif
}
#endif

/* Row after row: the sums of the columns stay with their threads, in registers or, without HELD, in `parts`. */
extern "C" __global__ void __launch_bounds__(THREADS) backward(Norms n) {
    int lane = threadIdx.x % TEAM, width = (int)n.width;
    float *to_x = n.parts + (i64)blockIdx.x * 2 * width, *to_h = to_x + width;
    Units zero = {};
#if HELD
    float of_x[R][V] = {}, of_h[R][V] = {};
#else
    EACH_VECTOR put<V>(to_x + j, zero), put<V>(to_h + j, zero);
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
        Narrows v = {n.v}, d = {n.d};
        Wides h = {n.gh};
        EACH_VECTOR v.take(k, start + j), d.take(k, start + j), h.take(k, start + j);
        EACH_VECTOR {
            Packed x = v.get(k, start + j), dx = d.get(k, start + j);
#if APART
            Packed dh = get_narrow(n.dh + start + j);
#else
            Packed dh = dx;
#endif
            Units scale = get<V>(n.scale + j), gh = h.get(k, start + j), hat;
            EACH {
                hat[e] = (x[e] - mean) * rstd;
                sum[0] += dx[e] * scale[e];
                sum[1] += dx[e] * scale[e] * hat[e];
            }
#if HELD
            EACH of_x[k][e] += dx[e] * hat[e], of_h[k][e] += dh[e] * gh[e];
#else
            Units one = get<V>(to_x + j), two = get<V>(to_h + j);
            EACH one[e] += dx[e] * hat[e], two[e] += dh[e] * gh[e];
            put<V>(to_x + j, one), put<V>(to_h + j, two);
#endif
        }
        add_up(sum);
        float one = sum[0] * share, two = sum[1] * share;
        EACH_VECTOR {
            Packed x = v.get(k, start + j), dx = d.get(k, start + j);
            Units scale = get<V>(n.scale + j), out;
            EACH out[e] = (dx[e] * scale[e] - one - (x[e] - mean) * rstd * two) * rstd;
            put_narrow(n.v + start + j, out);
        }
    }
#if HELD
    leave(of_x, to_x, lane, width);
    leave(of_h, to_h, lane, width);
#endif
}
#endif
#endif

/* --- columns ------------------------------------------------------------------------------------- */

/* Sums over the second dimension of a block of at most MOST threads, in a fixed order, for all of them. */
template <int MOST, int N> __device__ __forceinline__ void add_down(float (&v)[N]) {
    __shared__ float part[N][MOST + 8]; /* 8: apart from each other's banks */
    int across = blockDim.x, me = threadIdx.y * across + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) part[i][me] = v[i];
    __syncthreads();
    for (int j = me; j < N * across; j += across * blockDim.y) {
        float sum = 0.0f, *column = &part[j / across][j % across];
        for (int y = 0; y < blockDim.y; y++) sum += column[y * across];
        *column = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = part[i][threadIdx.x];
}

/* --- batch norm ---------------------------------------------------------------------------------- */

#if !LAYER
#if HELD
#define EXAMPLES R
#else
#define EXAMPLES (((int)n.batch + (int)blockDim.y - 1) / (int)blockDim.y)
#endif
#define EACH_EXAMPLE \
    if (in) \
        UNROLL for (int k = 0, b = threadIdx.y; k < EXAMPLES; k++, b += blockDim.y) if (k < EXAMPLES - 1 || b < n.batch)

struct Place { /* of V numbers of one example at a processed step; past its end they lie as they came */
    i64 at;
    bool alive;
};

__device__ __forceinline__ Place place(const Norms &n, i64 t, int b, int j) {
    i64 length = ENDS ? n.lengths[b] : n.steps;
    bool alive = !ENDS || t < length;
    return {((alive && n.reverse ? length - 1 - t : t) * n.batch + b) * n.width + j, alive};
}

/* One over the number of examples alive at a step; every thread of a block has to come. */
__device__ __forceinline__ float share_of(const Norms &n, i64 t) {
    if (!ENDS) return 1.0f / n.batch;
    int count = 0;
    for (int first = 0; first < n.batch; first += blockDim.y) {
        int b = first + threadIdx.y;
        count += __syncthreads_count(b < n.batch && t < n.lengths[b]);
    }
    return 1.0f / max(count / (int)blockDim.x, 1);
}

#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS) forward(Norms n) {
    u32 tiles = (u32)n.tiles;
    i64 t = blockIdx.x / tiles;
    int j = ((int)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * V;
    bool in = j < n.width;
    Narrows v = {n.v};
    EACH_EXAMPLE {
        Place p = place(n, t, b, j);
        if (p.alive) v.take(k, p.at);
    }
    Units mean = {}, var = {};
    if (n.given) {
        if (in) mean = get<V>(n.mean + t * n.width + j), var = get<V>(n.var + t * n.width + j);
    } else {
        float share = share_of(n, t);
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (!p.alive) continue;
            Packed x = v.get(k, p.at);
            EACH mean[e] += x[e];
        }
        add_down<THREADS>(mean.v);
        EACH mean[e] *= share;
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (!p.alive) continue;
            Packed x = v.get(k, p.at);
            EACH var[e] += (x[e] - mean[e]) * (x[e] - mean[e]);
        }
        add_down<THREADS>(var.v);
        EACH var[e] *= share;
        if (in && threadIdx.y == 0) put<V>(n.mean + t * n.width + j, mean), put<V>(n.var + t * n.width + j, var);
    }
    if (!in) return;
    Units scale = get<V>(n.scale + j), rstd;
    Packed bias = get_narrow(n.bias + j);
    EACH rstd[e] = inverse(var[e], n.eps);
    EACH_EXAMPLE {
        Place p = place(n, t, b, j);
        if (!p.alive) continue;
        Packed x = v.get(k, p.at);
        Units out;
        EACH out[e] = (x[e] - mean[e]) * rstd[e] * scale[e] + bias[e];
        put_narrow(n.v + p.at, out);
    }
}
#else

/* Step after step: the sums of the columns stay with their threads. */
extern "C" __global__ void __launch_bounds__(THREADS) backward(Norms n) {
    u32 tiles = (u32)n.tiles;
    i64 part = blockIdx.x / tiles, parts = gridDim.x / tiles;
    int j = ((int)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * V;
    bool in = j < n.width;
    float total[2 * V] = {}; /* of the scales of x and h */
    Units scale = {};
    if (in) scale = get<V>(n.scale + j);
    for (i64 t = part; t < n.steps; t += parts) {
        Narrows v = {n.v}, d = {n.d};
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (p.alive) v.take(k, p.at), d.take(k, p.at);
        }
        Units mean = {}, rstd = {};
        if (in) mean = get<V>(n.mean + t * n.width + j), rstd = get<V>(n.var + t * n.width + j);
        EACH rstd[e] = inverse(rstd[e], n.eps);
        float sum[2 * V] = {};
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            if (!p.alive) continue;
            Packed x = v.get(k, p.at), dx = d.get(k, p.at);
#if APART
            Packed dh = get_narrow(n.dh + p.at);
#else
            Packed dh = dx;
#endif
            Units gh = get<V>(n.gh + p.at);
            EACH {
                sum[e] += dx[e];
                sum[V + e] += dx[e] * ((x[e] - mean[e]) * rstd[e]);
                total[V + e] += dh[e] * gh[e];
            }
        }
        EACH total[e] += sum[V + e];
        if (!n.given) {
            float share = share_of(n, t);
            add_down<THREADS>(sum);
            EACH sum[e] *= share, sum[V + e] *= share;
        } else {
            EACH sum[e] = sum[V + e] = 0.0f;
        }
        EACH_EXAMPLE {
            Place p = place(n, t, b, j);
            Units out = {};
            if (p.alive) {
                Packed x = v.get(k, p.at), dx = d.get(k, p.at);
                EACH out[e] = (dx[e] - sum[e] - (x[e] - mean[e]) * rstd[e] * sum[V + e]) * scale[e] * rstd[e];
            }
            put_narrow(n.v + p.at, out);
        }
    }
    add_down<THREADS>(total);
    if (!in || threadIdx.y) return;
    float *to = n.parts + part * 2 * n.width + j;
    EACH to[e] = total[e], to[n.width + e] = total[V + e];
}
#endif
#endif

/* --- sums over all rows --------------------------------------------------------------------------- */

#if BACK
struct Sums {
    const float *d, *hat; /* [rows, width] */
    float *parts;         /* [count, 2, width]: of d · hat and of d */
    i64 rows, width, count;
    float *first, *second; /* [width] */
};

/* A block has some columns of some rows, VC columns a thread. */
extern "C" __global__ void __launch_bounds__(256) sum_products(Sums s) {
    u32 tiles = gridDim.x / (u32)s.count;
    i64 part = blockIdx.x / tiles, j = (i64)(blockIdx.x % tiles * blockDim.x + threadIdx.x) * VC;
    bool in = j < s.width;
    float sum[2 * VC] = {};
    if (in)
#pragma unroll 4
        for (i64 row = part * blockDim.y + threadIdx.y; row < s.rows; row += s.count * blockDim.y) {
            Wide<VC> d = get<VC>(s.d + row * s.width + j), hat = get<VC>(s.hat + row * s.width + j);
#pragma unroll
            for (int e = 0; e < VC; e++) sum[e] += d[e] * hat[e], sum[VC + e] += d[e];
        }
    add_down<256>(sum);
    if (!in || threadIdx.y) return;
    float *to = s.parts + part * 2 * s.width + j;
#pragma unroll
    for (int e = 0; e < VC; e++) to[e] = sum[e], to[s.width + e] = sum[VC + e];
}

/* The parts of both added up: one column a thread, and the parts over the second dimension of a block. */
extern "C" __global__ void __launch_bounds__(256) finish(Sums gates, Sums cell) {
    i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    bool second = j >= 2 * gates.width;
    if (second) j -= 2 * gates.width;
    const float *parts = second ? cell.parts : gates.parts;
    i64 width = second ? cell.width : gates.width, count = second ? cell.count : gates.count;
    bool in = j < 2 * width;
    float sum[1] = {};
    if (in)
#pragma unroll 8
        for (i64 p = threadIdx.y; p < count; p += blockDim.y) sum[0] += parts[p * 2 * width + j];
    add_down<256>(sum);
    if (!in || threadIdx.y) return;
    float *to = j < width ? (second ? cell.first : gates.first) : (second ? cell.second : gates.second);
    to[j < width ? j : j - width] = sum[0];
}
#endif
