/* The argument of a generated step function: pointers to the values of one row, indexed by unit. Included once per
 * type. */
typedef struct {
    REAL *gate[8];                      /* in: x·W_x, plus h·W_h if they are merged; out: the stored value */
    const REAL *r[8];                   /* h·W_h if it is kept apart */
    const REAL *bias_x[8], *bias_r[8];
    const REAL *old[4];                 /* the states before the step */
    REAL *new[4];                       /* the states after the step */
    const REAL *zone[4], *zero[4];      /* masks of the states: keep the old value; set the candidate to zero */
    const REAL *drop[4], *add[4];       /* given masks: leave the new value out; add the old value */
    const REAL *update, *hold, *held;   /* masks of update and held gate; the held gate of the previous step */
    const REAL *parameter[8];
    REAL *slot[2];                      /* other stored values */
    REAL *raw;                          /* the norm's input */
    const REAL *shown;                  /* the norm's result */
    /* the backward pass */
    REAL *dstate[4];                    /* in: gradients of the new states; out: of the old states */
    const REAL *dy;                     /* gradient of the output, added to the gradient of the new h */
    REAL *owed;                         /* in: gradient of the gate, from the next step; out: of the held gate */
    REAL *dx[8], *dr[8];                /* gradients of x and, if kept apart, of r */
    REAL *dparameter[8];                /* accumulated */
    REAL *dshown;                       /* gradient of the norm's result */
    const REAL *draw;                   /* gradient of the norm's input */
    REAL *dzone[4], *dzero[4], *ddrop[4], *dadd[4], *dupdate, *dhold; /* gradients of given masks */
    /* products inside the step */
    const REAL *inner[32];              /* their results, one per part */
    REAL *in[16];                       /* their inputs */
    const REAL *din[16];                /* gradients of their inputs */
    REAL *dinner[32];                   /* gradients of their results */
} STEP;

typedef void FUNCTION(const STEP *s, int64_t from, int64_t to);

typedef struct { /* a cell: its sizes and its functions, as definition/c.py describes them */
    int64_t gates, states;
    int64_t apart; /* h·W_h is kept apart from x·W_x, not simply added to it */
    int64_t held;  /* the storage of the gate that may be held: a gate, or `gates` + a slot */
    int64_t slots; /* the number of slots */
    int64_t slot_gate[2]; /* the gate whose h·W_h a slot stores; -1: another value */
    int64_t lead[4]; /* the state whose mask a state uses: itself, or the first of its group */
    int64_t parameters;
    FUNCTION *forward[3], *backward[3], *again[3]; /* ZONEOUT, DROPOUTS, MASKS */
    FUNCTION *norm_gates, *norm_raw, *norm_shows, *norm_back_shows, *norm_back_gates; /* NULL: no zo.shown */
    int64_t products, levels; /* inside the step; a product depends on products of lower levels only */
    int64_t level[16], parts[16]; /* of each product */
    int64_t links[16], link[16][4]; /* the matrices that a product applies, the first one first */
    FUNCTION *enter[3][16], *leave[3][16]; /* per variant and level */
    FUNCTION *inputs[3];
} CELL;
