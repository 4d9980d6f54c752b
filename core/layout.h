/* core/layout.h - where everything lies: the layout of a unit's slots

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

static int64_t fsdpi_bytes(int64_t numel, fsdp_dtype dtype) {
    return numel * (int64_t)fsdp_dtype_size(dtype);
}

static int fsdpi_shards(const fsdp_unit *u) { return u->desc.info.shard_mesh_size; }       // W
static int fsdpi_replicas(const fsdp_unit *u) { return u->desc.info.replicate_mesh_size; } // R
static int fsdpi_ranks(const fsdp_unit *u) { return fsdpi_shards(u) * fsdpi_replicas(u); }

static fsdpi_part *fsdpi_part_of(const fsdp_unit *u, const fsdpi_param *p) {
    return &u->layout.parts[p->part];
}

// The block that a part's shards lie in, and the dtype of its gradients.
static fsdpi_flat_block *fsdpi_flat_of(const fsdp_unit *u, const fsdpi_part *part) {
    return &u->model->flats[part->dtype];
}
static fsdp_dtype fsdpi_grad_dtype(const fsdp_model *m, fsdp_dtype dtype) {
    return m->desc.grad_dtype && fsdp_dtype_is_float(dtype) ? m->desc.grad_dtype : dtype;
}

// Full parameters and gradients begin at multiples of a cache line, on GPUs as cudaMalloc does.
static int64_t fsdpi_align_numel(const fsdp_model *m, fsdp_dtype dtype) {
    return (m->world->mode == FSDPI_NATIVE ? 256 : FSDPI_ALIGN) / (int64_t)fsdp_dtype_size(dtype);
}
static int64_t fsdpi_aligned(const fsdp_model *m, int64_t bytes) {
    return fsdpi_align_up(bytes, fsdpi_align_numel(m, FSDP_U8));
}

/* Lay out the trainable or the frozen parameters of a part. tmp: room for all parameters of the
   unit. With segs and blocks it fills them; offsets are always written to tmp, in order. */
static fsdp_status fsdpi_list_layout(const fsdp_unit *u, const fsdpi_part *part, int trainable,
                                     fsdp_layout *lay, fsdp_layout_param *tmp, fsdp_seg *segs,
                                     fsdp_block *blocks) {
    int64_t min = u->model->desc.direct_min, size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int count = 0;
    for (int i = 0; i < u->desc.num_params; i++)
        if (fsdpi_part_of(u, &u->params[i]) == part && u->params[i].requires_grad == trainable)
            tmp[count++] = u->params[i].lay;
    lay->world = fsdpi_shards(u);
    lay->rank = u->desc.info.shard_mesh_rank;
    lay->align = fsdpi_align_numel(u->model, part->param_dtype);
    lay->direct_numel = min == FSDP_DIRECT_NEVER ? min : fsdpi_ceil_div(min, size);
    return fsdp_layout_params(lay, tmp, count, segs, blocks);
}

static void fsdpi_list_store(fsdp_unit *u, const fsdpi_part *part, int trainable,
                             const fsdp_layout_param *tmp, int gradients) {
    for (int i = 0, k = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (fsdpi_part_of(u, p) != part || p->requires_grad != trainable) continue;
        if (gradients) p->grad_offset = tmp[k++].full_offset;
        else p->lay = tmp[k++];
    }
}

/* Where a part with an extension lies in the slot: its strings, rank after rank, then the parameter
   that is made of them. */
static void fsdpi_extended_layout(fsdp_unit *u, fsdpi_part *part) {
    fsdpi_param *p = part->extended;
    fsdpi_work *gather = &u->layout.all_gather;
    int64_t at = u->layout.slot_bytes;
    for (int i = 0; i < p->num_strings; i++) {
        fsdp_seg seg = {0, at, p->string_bytes[i]};
        if (gather->segs) gather->segs[gather->num] = seg;
        gather->num++;
        part->num_gather++;
        p->string_offset[i] = at;
        at = fsdpi_aligned(u->model, at + fsdpi_shards(u) * p->string_bytes[i]);
    }
    p->lay.full_offset = at / (int64_t)fsdp_dtype_size(part->param_dtype);
    u->layout.slot_bytes = fsdpi_aligned(
        u->model, at + fsdpi_bytes(fsdpi_shards(u) * p->lay.shard_numel, part->param_dtype));
}

/* The slot of gathered parameters, part after part:
   [trainables | frozen | trainables copied out | frozen copied out] */
static void fsdpi_slot_layout(fsdp_unit *u, fsdpi_part *part, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u);
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int64_t align = fsdpi_align_numel(u->model, part->param_dtype);
    fsdpi_work *gather = &u->layout.all_gather, *out = &part->copy_out;
    part->slot = u->layout.slot_bytes / size;
    part->num_gather = 0;
    int64_t frozen_full = fsdpi_align_up(part->slot + world * part->train.shard_numel, align);
    int64_t finals = fsdpi_align_up(frozen_full + world * part->frozen.shard_numel, align);
    int64_t end = finals;
    for (int trainable = 1; trainable >= 0; trainable--) {
        fsdp_layout lay;
        memset(&lay, 0, sizeof lay);
        lay.shard_base = trainable ? part->train.base : part->frozen.base;
        lay.full_base = trainable ? part->slot : frozen_full;
        lay.final_base = end;
        int lists = gather->segs && !part->extended;
        (void)fsdpi_list_layout(u, part, trainable, &lay, tmp,
                                lists ? gather->segs + gather->num : NULL,
                                lists && out->blocks ? out->blocks + out->num : NULL);
        fsdpi_list_store(u, part, trainable, tmp, 0);
        end += lay.final_numel;
        if (part->extended) continue; // its strings are gathered in place of its shard
        gather->num += lay.num_segs;
        part->num_gather += lay.num_segs;
        out->num += lay.num_blocks;
    }
    if (part->extended) fsdpi_extended_layout(u, part);
    else u->layout.slot_bytes = fsdpi_aligned(u->model, end * size);
}

/* The slot of gradients, part after part: [reduce input: trainables, users | where the caller
   writes packed ones]. With several the reduce input is a slot of its own, and has the users. */
static void fsdpi_grad_layout(fsdp_unit *u, fsdpi_part *part, fsdp_layout_param *tmp) {
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype), reduce = u->layout.reduce_numel;
    fsdpi_work *scatter = &u->layout.reduce_scatter[0];
    fsdp_layout lay;
    if (part->num_train == 0) return;
    memset(&lay, 0, sizeof lay);
    part->grad = u->layout.grad_bytes / size;
    if (u->layout.train_parts > 1) reduce = fsdpi_shards(u) * part->train.shard_numel;
    lay.shard_base = part->train.base;
    lay.full_base = part->grad;
    lay.final_base = fsdpi_align_up(part->grad + reduce,
                                    fsdpi_align_numel(u->model, part->param_dtype));
    (void)fsdpi_list_layout(u, part, 1, &lay, tmp,
                            scatter->segs ? scatter->segs + scatter->num : NULL,
                            part->chunk_cat.blocks);
    fsdpi_list_store(u, part, 1, tmp, 1);
    part->chunk_cat.num = lay.num_blocks;
    for (int i = 0; scatter->segs && i < lay.num_segs; i++) // its place in the reduce input
        scatter->segs[scatter->num + i].full += fsdpi_shards(u) * part->reduce - part->grad;
    scatter->num += lay.num_segs;
    u->layout.grad_bytes = fsdpi_aligned(u->model, (lay.final_base + lay.final_numel) * size);
}

#define FSDPI_UNIT_MAX ((int64_t)1 << 56) // elements: the bytes of its slots fit 63 bits

/* The layout of a unit's slots, in two uses: with NULL lists it measures (before commit), with
   lists it fills them. */
static fsdp_status fsdpi_unit_layout(fsdp_unit *u, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u), users = fsdpi_ranks(u) > 1 ? u->layout.num_train : 0;
    int64_t total = 0;
    u->layout.slot_bytes = u->layout.grad_bytes = u->layout.slice_bytes = u->layout.train_numel = 0;
    u->layout.all_gather.num = u->layout.reduce_scatter[0].num = 0;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_part *part = &u->layout.parts[k];
        part->copy_out.num = part->chunk_cat.num = 0;
        part->reduce = u->layout.train_numel;
        for (int trainable = 1; trainable >= 0; trainable--) {
            fsdp_layout lay;
            memset(&lay, 0, sizeof lay);
            fsdp_status status = fsdpi_list_layout(u, part, trainable, &lay, tmp, NULL, NULL);
            if (status) return status;
            fsdpi_list *list = trainable ? &part->train : &part->frozen;
            list->shard_numel = lay.shard_numel;
            list->packed_numel = lay.packed_numel;
            total += lay.shard_numel;
            if (total > FSDPI_UNIT_MAX / world) return FSDP_ERR_INVALID_ARG;
        }
        u->layout.train_numel += part->train.shard_numel;
    }
    u->layout.users_offset = world * u->layout.train_numel;
    u->layout.reduce_numel = u->layout.users_offset + world * users;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_slot_layout(u, &u->layout.parts[k], tmp);
        fsdpi_grad_layout(u, &u->layout.parts[k], tmp);
    }
    for (int i = 0; i < u->desc.num_params && u->desc.slices; i++)
        u->layout.slice_bytes += fsdpi_bytes(world * u->params[i].lay.shard_numel / u->desc.slices,
                                             fsdpi_part_of(u, &u->params[i])->param_dtype);
    return FSDP_OK;
}

static int fsdpi_class_find(fsdp_model *m, int pool, size_t bytes) {
    bytes = (size_t)fsdpi_aligned(m, (int64_t)(bytes ? bytes : 1));
    for (int i = 0; i < m->num_classes; i++)
        if (m->classes[i].pool == pool && m->classes[i].bytes == bytes) return i;
    if (fsdpi_grow(m, (void **)&m->classes, m->num_classes, &m->cap_classes, sizeof *m->classes,
                   "list of pools", ""))
        return -1;
    fsdpi_class *c = &m->classes[m->num_classes];
    memset(c, 0, sizeof *c);
    c->pool = pool;
    c->bytes = bytes;
    return m->num_classes++;
}

// The facts as they are now, and the routes that follow: again when an option has changed.
static void fsdpi_unit_route(fsdp_unit *u) {
    const fsdpi_layout *l = &u->layout;
    const fsdpi_part *part = &l->parts[l->users_part];
    const fsdp_model_desc *md = &u->model->desc;
    fsdpi_facts f = FSDP_ZERO;
    f.shards = fsdpi_shards(u);
    f.replicas = fsdpi_replicas(u);
    f.one_part = l->num_parts == 1;
    f.one_train = l->train_parts <= 1;
    f.extended = l->parts[0].extended != NULL;
    f.stored = part->dtype;
    f.gathered = part->param_dtype;
    f.grad = fsdpi_grad_dtype(u->model, part->dtype);
    f.reduce = l->reduce_dtype;
    f.offload = md->cpu_offload != 0;
    f.overwrite = md->grads_overwrite != 0;
    f.debug = md->debug || fsdpi_is_guarded(u->model->world);
    f.fuses = (u->model->world->caps.flags & FSDP_CAP_FUSED_REDUCE) != 0;
    f.hook = u->options.all_reduce_hook != NULL;
    f.custom = u->options.custom[2] != NULL;
#define FSDP_X(type, name, initial) f.name = u->options.name;
    FSDPI_ROUTE_OPTIONS(FSDP_X)
#undef FSDP_X
    for (int adds = 0; adds < 2; adds++) u->route[adds] = fsdpi_route_of(&f, adds);
}

static fsdp_status fsdpi_unit_classes(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int64_t bytes[FSDP_POOL_COUNT] = {0};
    int64_t none = u->layout.num_train ? 0 : -1,
            reduce = fsdpi_bytes(u->layout.reduce_numel, u->layout.reduce_dtype);
    const fsdpi_route *route = &u->route[0];
    int alias = route->gather == FSDPI_GATHER_ALIAS;
    bytes[FSDP_POOL_GATHER] = alias ? -1 : u->layout.slot_bytes;
    bytes[FSDP_POOL_SLICE] = u->desc.slices ? u->layout.slice_bytes : -1;
    bytes[FSDP_POOL_GRAD] = none ? none : u->layout.grad_bytes;
    bytes[FSDP_POOL_RIN] = none ? none : reduce;
    bytes[FSDP_POOL_ROUT] = none ? none : reduce / fsdpi_shards(u);
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
        u->layout.classes[pool] = -1;
        if (bytes[pool] < 0) continue;
        int at = fsdpi_class_find(m, pool, (size_t)bytes[pool]);
        if (at < 0) return FSDP_ERR_OUT_OF_MEMORY;
        u->layout.classes[pool] = at;
        m->classes[at].ahead |= (pool == FSDP_POOL_GATHER && m->classes[at].units++ > 0) ||
                                (pool == FSDP_POOL_GRAD && route->grads_ahead) ||
                                (pool == FSDP_POOL_ROUT && fsdpi_replicas(u) > 1);
    }
    return FSDP_OK;
}
