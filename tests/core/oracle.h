/* oracle.h - what training has to come out as: one process holds every full parameter and plays
   all ranks in turn, in plain loops. Nothing here knows of shards, slots or streams.

   A net is a list of units; a step is a script, an array of o_op, which the oracle runs by o_run
   and a test runs by the library's hooks: the same layers on the same inputs. An oracle works in
   the dtypes it is given, rounding where the library documents that it rounds and summing in rank
   order, so that an oracle with a run's dtypes gives the run's bits, and one that is f64 throughout
   gives the true values. Include it after the implementation of fsdp.h.

   SPDX-License-Identifier: MIT */
#ifndef ORACLE_H
#define ORACLE_H

enum { O_WIDTH = 4, O_DIMS = 3, O_PARAMS = 4, O_UNITS = 6, O_SEQ = 8, O_MICROS = 4, O_WORLD = 8 };

typedef struct o_param {
    int ndim, shard_dim, frozen;
    int64_t shape[O_DIMS], numel;
} o_param;

typedef struct o_unit {
    o_param params[O_PARAMS];
    int count;
} o_unit;

enum {
    O_ALL_USED = 0,
    O_SOME_RANKS,
    O_NOBODY
}; // which ranks use parameter 1 of a unit, and others

// Of what is stored, of what is gathered and of gradients, of the reduction. KEEP as in descs.
typedef struct o_dtypes {
    fsdp_dtype stored, param, reduce;
} o_dtypes;

typedef struct o_net {
    o_unit units[O_UNITS];
    int count;
    int seq[O_SEQ], length; // a forward: units in order, some more than once
    int usage;
    uint64_t seed;
} o_net;

// The script. a: a unit, a position in seq, or a value; m: a microbatch, for O_SET_SYNC a unit or
// -1 for all.
enum {
    O_PRE_FORWARD = 1,
    O_COMPUTE,
    O_POST_FORWARD,
    O_PRE_BACKWARD,
    O_GRAD,
    O_POST_BACKWARD,
    O_FINALIZE,
    O_UPDATE,
    O_ZERO_GRAD,
    O_SET_SYNC,
    O_SET_LAST,
    O_SET_GRAD, // of these the oracle
    O_UNSHARD,
    O_WAIT,
    O_RESHARD // needs about a half
};
typedef struct o_op {
    int kind, a, m;
} o_op;

#define O_LR    0.00390625 // small: large steps make training chaotic, and roundings grow
#define O_DECAY 0.0625 // so that a parameter that is skipped and one with a zero gradient differ

LAB_PRECISE_BEGIN

// Sums are in f32, or in f64 if that is what is read or written. A sum of two floats in double that
// is then rounded to float is the float sum.
static double o_mid(fsdp_dtype a, fsdp_dtype b, double x) {
    return a == FSDP_F64 || b == FSDP_F64 ? x : (double)(float)x;
}

// [-0.5, 0.5), a multiple of 2^-16
static double o_initial(const o_net *net, int unit, int param, int64_t element) {
    uint64_t h = lab_hash(net->seed, (uint64_t)(unit * O_PARAMS + param), (uint64_t)element, 77);
    return (double)(h & 0xffff) / 65536.0 - 0.5;
}

// Input (what 0) or target (what 1) of a rank in a microbatch; [-1, 1), a multiple of 2^-8
static double o_input(const o_net *net, int step, int micro, int rank, int what, int i) {
    uint64_t h = lab_hash(net->seed, (uint64_t)(step * 64 + micro), (uint64_t)rank,
                          (uint64_t)(what * O_WIDTH + i));
    return (double)(h & 0x1ff) / 256.0 - 1.0;
}

// Whether a rank touches a parameter in a microbatch.
static int o_uses(const o_net *net, int step, int micro, int rank, int unit, int param) {
    if (net->usage == O_ALL_USED || param % 2 == 0) return 1;
    if (net->usage == O_NOBODY && (unit + step) % 2 == 0) return 0;
    return (int)(lab_hash(net->seed, (uint64_t)(step * 64 + micro), (uint64_t)(rank * 64 + unit),
                          (uint64_t)param) %
                     3 !=
                 0);
}

/* One unit as a layer of width 4: z = P x, y = x/2 + z/(1+|z|), where element e of a parameter
   stands in row e mod 4 and meets input (e/4 + parameter) mod 4. p[k] NULL: not used. Sums run in
   one order, so that the same numbers give the same bits. */
#define O_DEFINE_LAYER(T)                                                                          \
    __attribute__((noinline)) static void o_layer_##T(const T *const *p, const int64_t *numel,     \
                                                      int count, const T *x, T *z, T *y) {         \
        for (int j = 0; j < O_WIDTH; j++) z[j] = 0;                                                \
        for (int k = 0; k < count; k++)                                                            \
            for (int64_t e = 0; p[k] && e < numel[k]; e++)                                         \
                z[e % O_WIDTH] += p[k][e] * x[(e / O_WIDTH + k) % O_WIDTH];                        \
        for (int j = 0; j < O_WIDTH; j++)                                                          \
            y[j] = x[j] / 2 + z[j] / (1 + (z[j] < 0 ? -z[j] : z[j]));                              \
    }                                                                                              \
    /* dx may be NULL; dp[k] NULL: not wanted */                                                   \
    __attribute__((noinline)) static void o_backward_##T(                                          \
        const T *const *p, T *const *dp, const int64_t *numel, int count, const T *x, const T *z,  \
        const T *dy, T *dx) {                                                                      \
        T dz[O_WIDTH];                                                                             \
        for (int j = 0; j < O_WIDTH; j++) {                                                        \
            T d = 1 + (z[j] < 0 ? -z[j] : z[j]);                                                   \
            dz[j] = dy[j] / (d * d);                                                               \
            dx[j] = dy[j] / 2;                                                                     \
        }                                                                                          \
        for (int k = 0; k < count; k++)                                                            \
            for (int64_t e = 0; p[k] && e < numel[k]; e++) {                                       \
                int64_t i = (e / O_WIDTH + k) % O_WIDTH;                                           \
                dx[i] += dz[e % O_WIDTH] * p[k][e];                                                \
                if (dp[k]) dp[k][e] = dz[e % O_WIDTH] * x[i];                                      \
            }                                                                                      \
    }
O_DEFINE_LAYER(float)
O_DEFINE_LAYER(double)

// One step of the optimizer, in f32 or f64: p - lr * (g + decay * p).
static double o_updated(fsdp_dtype dtype, double p, double g) {
    double decay = o_mid(dtype, dtype, O_DECAY * p);
    double slope = o_mid(dtype, dtype, g + decay);
    double move = o_mid(dtype, dtype, O_LR * slope);
    return lab_round(dtype, o_mid(dtype, dtype, p - move));
}

// Activations of one rank: at[m][k] is what position k of seq saw in microbatch m.
typedef struct o_acts {
    double x[O_WIDTH], z[O_WIDTH], y[O_WIDTH], dx[O_WIDTH];
} o_acts;

typedef struct o_model {
    const o_net *net;
    int world, step, sync[O_UNITS];
    o_dtypes dtypes[O_UNITS];
    double *master[O_UNITS][O_PARAMS], *grad[O_UNITS][O_PARAMS]; // of the optimizer; averaged
    double *slot[O_WORLD][O_UNITS][O_PARAMS];                    // where a rank's backward writes
    double *kept[O_WORLD][O_UNITS][O_PARAMS]; // in reduce_dtype, with earlier microbatches
    int slot_live[O_UNITS], kept_live[O_UNITS], open[O_UNITS];
    int alias[O_UNITS]; // one rank, one dtype: the slot is the gradient itself, and is added to
    int used[O_UNITS][O_PARAMS];
    int has_grad[O_UNITS], param_has_grad[O_UNITS][O_PARAMS];
    o_acts acts[O_WORLD][O_MICROS][O_SEQ];
    double *memory;
} o_model;

static int64_t o_numel(const o_net *net) {
    int64_t sum = 0;
    for (int u = 0; u < net->count; u++)
        for (int i = 0; i < net->units[u].count; i++) sum += net->units[u].params[i].numel;
    return sum;
}

static void o_free(o_model *o) {
    if (o) free(o->memory);
    free(o);
}

// dtypes: of each unit. NULL: no memory.
static o_model *o_make(const o_net *net, int world, const o_dtypes *dtypes) {
    o_model *o = (o_model *)calloc(1, sizeof *o);
    size_t total = (size_t)o_numel(net) * (size_t)(2 + 2 * world);
    if (!o || !(o->memory = (double *)calloc(total + 1, sizeof *o->memory))) {
        o_free(o);
        return NULL;
    }
    o->net = net;
    o->world = world;
    for (int u = 0; u < net->count; u++) {
        o_dtypes *d = &o->dtypes[u];
        *d = dtypes[u];
        if (!d->param) d->param = d->stored;
        if (!d->reduce) d->reduce = d->stored;
        o->sync[u] = 1;
    }
    double *at = o->memory;
    for (int u = 0; u < net->count; u++)
        for (int i = 0; i < net->units[u].count; i++) {
            int64_t numel = net->units[u].params[i].numel;
            o->master[u][i] = at, at += numel;
            o->grad[u][i] = at, at += numel;
            for (int r = 0; r < world; r++) o->slot[r][u][i] = at, at += numel;
            for (int r = 0; r < world; r++) o->kept[r][u][i] = at, at += numel;
            for (int64_t e = 0; e < numel; e++)
                o->master[u][i][e] = lab_round(o->dtypes[u].stored, o_initial(net, u, i, e));
        }
    return o;
}

/* The layer of one rank, forward (dy NULL) or backward, on parameters in the compute dtype: double
   if that is f64, else in float. dp: as doubles. tmp: room for 2 * numel of the unit. */
static void o_apply(const o_net *net, fsdp_dtype param_dtype, int unit, double *const *params,
                    const int *uses, o_acts *act, const double *dy, double *const *dp, void *tmp) {
    const o_unit *u = &net->units[unit];
    int64_t numel[O_PARAMS];
    for (int i = 0; i < u->count; i++) numel[i] = u->params[i].numel;
#define O_APPLY(T)                                                                                 \
    do {                                                                                           \
        T *at = (T *)tmp, *grads[O_PARAMS], x[O_WIDTH], z[O_WIDTH], y[O_WIDTH], d[O_WIDTH];        \
        const T *values[O_PARAMS];                                                                 \
        for (int i = 0; i < u->count; i++) {                                                       \
            values[i] = uses[i] ? at : NULL;                                                       \
            for (int64_t e = 0; e < numel[i]; e++) *at++ = (T)params[i][e];                        \
            grads[i] = dy && uses[i] && !u->params[i].frozen ? at : NULL;                          \
            at += numel[i];                                                                        \
        }                                                                                          \
        for (int j = 0; j < O_WIDTH; j++) x[j] = (T)act->x[j], z[j] = (T)act->z[j];                \
        if (!dy) o_layer_##T(values, numel, u->count, x, z, y);                                    \
        for (int j = 0; j < O_WIDTH && !dy; j++) {                                                 \
            act->z[j] = (double)z[j];                                                              \
            act->y[j] = (double)y[j];                                                              \
        }                                                                                          \
        if (!dy) break;                                                                            \
        for (int j = 0; j < O_WIDTH; j++) y[j] = (T)dy[j];                                         \
        o_backward_##T(values, grads, numel, u->count, x, z, y, d);                                \
        for (int j = 0; j < O_WIDTH; j++) act->dx[j] = (double)d[j];                               \
        for (int i = 0; i < u->count; i++)                                                         \
            for (int64_t e = 0; grads[i] && e < numel[i]; e++) dp[i][e] = (double)grads[i][e];     \
    } while (0)
    if (param_dtype == FSDP_F64) O_APPLY(double);
    else O_APPLY(float);
#undef O_APPLY
}

// What position k of seq gets: the net's input, or the output before it; and from behind.
static void o_feed(const o_net *net, int step, int micro, int rank, int k, o_acts *acts) {
    for (int j = 0; j < O_WIDTH; j++)
        acts[k].x[j] = k ? acts[k - 1].y[j] : o_input(net, step, micro, rank, 0, j);
}
static void o_feed_back(const o_net *net, fsdp_dtype param_dtype, int step, int micro, int rank,
                        int k, const o_acts *acts, double *dy) {
    for (int j = 0; j < O_WIDTH; j++) {
        double error = acts[k].y[j] - o_input(net, step, micro, rank, 1, j);
        dy[j] = k + 1 < net->length ? acts[k + 1].dx[j] : o_mid(param_dtype, param_dtype, error);
    }
}

// Parameters of a unit as a forward sees them.
static void o_cast_params(const o_model *o, int unit, double **out, double *tmp) {
    for (int i = 0; i < o->net->units[unit].count; i++) {
        out[i] = tmp;
        for (int64_t e = 0; e < o->net->units[unit].params[i].numel; e++)
            *tmp++ = lab_round(o->dtypes[unit].param, o->master[unit][i][e]);
    }
}

static void o_compute(o_model *o, int k, int m, int backward, double *tmp) {
    const o_net *net = o->net;
    int unit = net->seq[k];
    fsdp_dtype dtype = o->dtypes[unit].param;
    const o_unit *u = &net->units[unit];
    int64_t numel = o_numel(net);
    double *params[O_PARAMS], *dp[O_PARAMS], dy[O_WIDTH], *at = tmp + numel;
    o_cast_params(o, unit, params, tmp);
    for (int i = 0; i < u->count; i++) dp[i] = at, at += u->params[i].numel;
    for (int r = 0; r < o->world; r++) {
        int uses[O_PARAMS];
        o_acts *acts = o->acts[r][m];
        for (int i = 0; i < u->count; i++) uses[i] = o_uses(net, o->step, m, r, unit, i);
        if (backward) o_feed_back(net, dtype, o->step, m, r, k, acts, dy);
        else o_feed(net, o->step, m, r, k, acts);
        o_apply(net, dtype, unit, params, uses, &acts[k], backward ? dy : NULL, dp, at);
        for (int i = 0; backward && i < u->count; i++) {
            if (!uses[i] || u->params[i].frozen) continue;
            double *slot = o->slot[r][unit][i];
            for (int64_t e = 0; e < u->params[i].numel; e++)
                slot[e] = lab_round(dtype, o_mid(dtype, 0, slot[e] + dp[i][e]));
        }
    }
}

static void o_begin(o_model *o, int unit) {
    const o_unit *u = &o->net->units[unit];
    o_dtypes d = o->dtypes[unit];
    o->open[unit] = 1;
    // With fsdp_set_reduce_scatter_unused_params 1.
    for (int i = 0; i < u->count; i++) o->used[unit][i] = !u->params[i].frozen;
    if (o->slot_live[unit]) return;
    o->alias[unit] = o->world == 1 && d.param == d.stored && d.reduce == d.stored &&
                     o->sync[unit] && !o->kept_live[unit];
    int add = o->alias[unit] && o->has_grad[unit];
    for (int r = 0; r < o->world; r++)
        for (int i = 0; i < u->count; i++)
            for (int64_t e = 0; e < u->params[i].numel; e++)
                o->slot[r][unit][i][e] = add ? o->grad[unit][i][e] : 0;
    o->slot_live[unit] = 1;
}

// The average over ranks of element e, added to the gradient.
static void o_average(o_model *o, int unit, int i, int64_t e, int kept) {
    o_dtypes d = o->dtypes[unit];
    fsdp_dtype input = kept ? d.reduce : d.param, read = input;
    double sum = 0, *grad = o->grad[unit][i];
    for (int r = 0; r < o->world; r++) {
        double x = kept ? o->kept[r][unit][i][e] : o->slot[r][unit][i][e];
        sum = r ? o_mid(input, d.stored, sum + x) : x;
    }
    if (o->world > 1) {
        if (d.reduce != FSDP_F32 && d.reduce != FSDP_F64) // rounded to before it is scaled
            sum = lab_round(d.reduce, sum), read = d.reduce;
        int wide = read == FSDP_F64 || d.stored == FSDP_F64;
        sum = o_mid(read, d.stored,
                    sum * (wide ? 1.0 / o->world : (double)(1.0f / (float)o->world)));
    }
    int add = o->has_grad[unit] && !o->alias[unit];
    grad[e] = lab_round(d.stored, add ? o_mid(read, d.stored, grad[e] + sum) : sum);
}

// End of a unit's backward on all ranks.
static void o_end(o_model *o, int unit) {
    const o_unit *u = &o->net->units[unit];
    o_dtypes d = o->dtypes[unit];
    int trainable = 0;
    o->open[unit] = 0;
    for (int i = 0; i < u->count; i++) trainable |= !u->params[i].frozen;
    if (!trainable) return;
    int keep = o->kept_live[unit] || d.param != d.reduce;
    for (int i = 0; i < u->count && keep; i++)
        for (int r = 0; r < o->world; r++)
            for (int64_t e = 0; e < u->params[i].numel; e++) {
                double *kept = &o->kept[r][unit][i][e], x = o->slot[r][unit][i][e];
                double sum = o->kept_live[unit] ? o_mid(d.param, d.reduce, *kept + x) : x;
                *kept = lab_round(d.reduce, sum);
            }
    if (keep) o->kept_live[unit] = 1, o->slot_live[unit] = 0;
    if (!o->sync[unit]) return;
    for (int i = 0; i < u->count; i++) {
        if (u->params[i].frozen) continue;
        for (int64_t e = 0; e < u->params[i].numel; e++) o_average(o, unit, i, e, keep);
        if (!o->has_grad[unit]) o->param_has_grad[unit][i] = 0;
        o->param_has_grad[unit][i] |= o->used[unit][i];
        o->used[unit][i] = 0;
    }
    o->has_grad[unit] = 1;
    o->slot_live[unit] = o->kept_live[unit] = o->alias[unit] = 0;
}

static void o_update(o_model *o) {
    for (int u = 0; u < o->net->count; u++)
        for (int i = 0; i < o->net->units[u].count; i++)
            for (int64_t e = 0;
                 o->has_grad[u] && o->param_has_grad[u][i] && e < o->net->units[u].params[i].numel;
                 e++)
                o->master[u][i][e] = o_updated(o->dtypes[u].stored, o->master[u][i][e],
                                               o->grad[u][i][e]);
    o->step++;
}

static void o_run(o_model *o, const o_op *ops, int count) {
    double *tmp = (double *)malloc((size_t)(4 * o_numel(o->net) + 1) * sizeof *tmp);
    for (int n = 0; n < count && tmp; n++) {
        o_op op = ops[n];
        if (op.kind == O_COMPUTE || op.kind == O_GRAD)
            o_compute(o, op.a, op.m, op.kind == O_GRAD, tmp);
        if (op.kind == O_PRE_BACKWARD && !o->open[op.a]) o_begin(o, op.a);
        if (op.kind == O_POST_BACKWARD) o_end(o, op.a);
        for (int u = 0; u < O_UNITS && op.kind == O_SET_SYNC; u++)
            if (op.m < 0 || op.m == u) o->sync[u] = op.a;
        if (op.kind == O_UPDATE) o_update(o);
        if (op.kind == O_ZERO_GRAD) memset(o->has_grad, 0, sizeof o->has_grad);
        for (int u = 0; op.kind == O_FINALIZE && u < o->net->count; u++)
            if (o->open[u]) o_end(o, u);
    }
    free(tmp);
}

LAB_PRECISE_END
#endif
