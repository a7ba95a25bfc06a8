/* Operations on rows, around the loop. In a ragged batch row b exists at step t if t < lengths[b].
 *
 * Rows are treated as bytes, unless they are converted or multiplied. They are moved in words of 1 to 16 bytes: the
 * largest that divides all of their addresses.
 */
#define BY_WORD(bytes, take, ...)               \
    ((bytes) == 16  ? take<uint4>(__VA_ARGS__)  \
     : (bytes) == 8 ? take<uint2>(__VA_ARGS__)  \
     : (bytes) == 4 ? take<u32>(__VA_ARGS__)    \
     : (bytes) == 2 ? take<u16>(__VA_ARGS__)    \
                    : take<u8>(__VA_ARGS__))

/* --- from one layout to another ------------------------------------------------------------------ */

struct Side { /* packed rows if `first_rows` is set, else a fixed number of rows at each step */
    u8 *start;
    const i64 *first_rows;     /* [steps]: the first packed row of each step */
    i64 step_bytes, row_bytes; /* bytes between steps, and between rows */
};

__device__ __forceinline__ u8 *row_of(const Side &s, i64 t, i64 b) {
    return s.start + (s.first_rows ? s.first_rows[t] * s.row_bytes : t * s.step_bytes) + b * s.row_bytes;
}

struct Move {
    Side from, to;
    i64 steps, batch, words, word; /* words of a row, and bytes of a word */
    const i64 *lengths;            /* [batch] */
};

template <class Word, class Index>
__device__ __forceinline__ void move_word(const Move &m, Index at) {
    Index words = (Index)m.words, batch = (Index)m.batch;
    Index row = at / words, word = at % words, t = row / batch, b = row % batch;
    bool alive = (i64)t < m.lengths[b];
    if (!alive && m.to.first_rows) return; /* the packed layout has no place for it */
    Word value = {};
    if (alive) value = ((const Word *)row_of(m.from, t, b))[word];
    ((Word *)row_of(m.to, t, b))[word] = value;
}

template <class Word>
__device__ __forceinline__ void move_one(const Move &m, i64 at, bool many) {
    if (many)
        move_word<Word, i64>(m, at);
    else /* with 64 bits a division takes many times as long */
        move_word<Word, u32>(m, (u32)at);
}

/* A thread moves one word, so that adjacent threads move adjacent words, for any width of a row. */
extern "C" __global__ void move(Move m) {
    i64 all = m.steps * m.batch * m.words, at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < all) BY_WORD(m.word, move_one, m, at, all >> 32);
}

/* --- zeros past the lengths ---------------------------------------------------------------------- */

#define MOST_ARRAYS 7

struct Clear {
    i64 steps, batch;
    const i64 *lengths; /* [batch] */
    i64 count;
    u8 *start[MOST_ARRAYS];
    i64 width[MOST_ARRAYS], word[MOST_ARRAYS]; /* bytes of a row, and of a word */
};

template <class Word>
__device__ __forceinline__ void zero(u8 *row, i64 width) { /* run by a warp */
    for (i64 i = threadIdx.x % 32; i < width / (i64)sizeof(Word); i += 32) ((Word *)row)[i] = Word{};
}

extern "C" __global__ void clear(Clear c) {
    i64 warps = blockDim.x / 32;
    for (i64 row = blockIdx.x * warps + threadIdx.x / 32; row < c.steps * c.batch; row += gridDim.x * warps) {
        if (row / c.batch < c.lengths[row % c.batch]) continue;
        for (i64 k = 0; k < c.count; k++) BY_WORD(c.word[k], zero, c.start[k] + row * c.width[k], c.width[k]);
    }
}

/* --- final states -------------------------------------------------------------------------------- */

struct State {
    const void *every, *initial; /* [steps, batch, width] and [batch, width] */
    narrow *last;                /* [batch, width] */
    i64 width, is_float;         /* is_float: `every` and `initial` are float, `last` may not be */
};

struct FinalStates {
    i64 steps, batch, reverse;
    const i64 *lengths; /* [batch], or NULL: all rows exist at all steps */
    State states[2];
};

extern "C" __global__ void final_states(FinalStates e) {
    State s = blockIdx.y ? e.states[1] : e.states[0];
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= e.batch * s.width) return;
    i64 length = e.lengths ? e.lengths[at / s.width] : e.steps, last = e.reverse ? 0 : length - 1;
    const void *from = length > 0 ? s.every : s.initial;
    i64 i = length > 0 ? last * e.batch * s.width + at : at;
    s.last[at] = s.is_float ? narrowed(((const float *)from)[i]) : ((const narrow *)from)[i];
}

/* --- h as it entered the gates, concatenated with x ------------------------------------------------ */

struct RecurrentInputs {
    i64 steps, batch, reverse;
    const i64 *lengths;                         /* [batch], or NULL */
    const bool *resets;                         /* [steps, batch], or NULL */
    const u8 *y, *h0, *reset_h;                 /* [steps, batch, outputs]; [batch, outputs] */
    const narrow *scale_h;                      /* [batch, outputs], or NULL */
    const u8 *x;                                /* [steps, batch, inputs] */
    u8 *out;                                    /* [steps, batch, outputs | inputs | ones] */
    i64 h_words, h_word, x_words, x_word, ones; /* words of a row and bytes of a word; ones: number of columns */
};

template <class Word>
__device__ __forceinline__ void copy_word(const u8 *from, u8 *to, i64 k) {
    ((Word *)to)[k] = ((const Word *)from)[k];
}

template <class Index>
__device__ __forceinline__ void write_word(const RecurrentInputs &e, Index at) {
    Index words = (Index)(e.h_words + e.x_words + e.ones), batch = (Index)e.batch;
    Index row = at / words;
    i64 word = at % words, t = row / batch, b = row % batch, h = e.h_words * e.h_word, x = e.x_words * e.x_word;
    u8 *to = e.out + (i64)row * (h + x + e.ones * (i64)sizeof(narrow));
    if (word >= e.h_words + e.x_words) {
        ((narrow *)(to + h + x))[word - e.h_words - e.x_words] = narrowed(1.f);
        return;
    }
    if (word >= e.h_words) {
        BY_WORD(e.x_word, copy_word, e.x + (i64)row * x, to + h, word - e.h_words);
        return;
    }
    i64 before = e.reverse ? t + 1 : t - 1;
    bool first = e.reverse ? before == e.steps || (e.lengths && before == e.lengths[b]) : t == 0;
    bool cut = e.resets && !(e.reverse && first) && e.resets[(e.reverse ? before : t) * e.batch + b];
    const u8 *from = cut ? e.reset_h + b * h : first ? e.h0 + b * h : e.y + (before * e.batch + b) * h;
    if (e.scale_h) { /* here a word is one element */
        float scale = widen(e.scale_h[b * e.h_words + word]);
        ((narrow *)to)[word] = narrowed(widen(((const narrow *)from)[word]) * scale);
    } else
        BY_WORD(e.h_word, copy_word, from, to, word);
}

extern "C" __global__ void recurrent_inputs(RecurrentInputs e) {
    i64 all = e.steps * e.batch * (e.h_words + e.x_words + e.ones), at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= all) return;
    if (all >> 32)
        write_word<i64>(e, at);
    else /* with 64 bits a division takes many times as long */
        write_word<u32>(e, (u32)at);
}

/* --- columns of a matrix as separate matrices ------------------------------------------------------ */

#define MOST_RANGES 4

struct SplitColumns {
    i64 rows, pitch;                           /* bytes of a row */
    const u8 *from[MOST_RANGES];               /* of the first row */
    u8 *to[MOST_RANGES];                       /* contiguous */
    i64 words[MOST_RANGES], word[MOST_RANGES]; /* words of a row, and bytes of a word */
};

extern "C" __global__ void split_columns(SplitColumns p) {
    i64 k = blockIdx.y, words = p.words[k], at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.rows * words) return;
    i64 row = p.rows * words >> 32 ? at / words : (u32)at / (u32)words;
    BY_WORD(p.word[k], copy_word, p.from[k] + row * p.pitch, p.to[k] + row * words * p.word[k], at - row * words);
}
