/* checkpoint/open.h - what is at a path: files, tensors, boxes

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: the way from a path to a sorted list of boxes. One process reads headers into one block of
// bytes; all ranks get that block and understand it alike. A checkpoint of ours, of PyTorch, and a
// model of Hugging Face differ in nothing but who tells the names of the files.

/* -------------------------------------------------------------------------------------------- */
// File calls as jobs.

static void fsdpi_ck_try_open(void *arg) {
    fsdpi_ck_open_job *j = (fsdpi_ck_open_job *)arg;
    if (fsdpi_ck_open(j->disk, j->path, 0, &j->file, &j->nbytes)) {
        j->error = j->disk->error;
        if (j->error == ENOENT || j->error == EISDIR || j->error == EINVAL || j->error == ENOTDIR ||
            j->error == ELOOP)
            fsdpi_ck_forget(j->disk);
    }
}
static void fsdpi_ck_read_bytes(void *arg) {
    fsdpi_ck_read_job *j = (fsdpi_ck_read_job *)arg;
    (void)fsdpi_ck_read(j->disk, j->file, j->path, j->to, j->nbytes, j->at);
}
static void fsdpi_ck_close_file(void *arg) {
    fsdpi_ck_open_job *j = (fsdpi_ck_open_job *)arg;
    (void)fsdpi_ck_close(j->disk, j->file, j->path);
    if (j->quiet) fsdpi_ck_forget(j->disk);
}

static int fsdpi_ck_note_leaf(void *arg, const char *name) {
    fsdpi_ck_list_job *j = (fsdpi_ck_list_job *)arg;
    int64_t n = (int64_t)strlen(name) + 1;
    if (strcmp(name, "manifest.json") == 0) j->has_manifest = 1;
    if (!fsdpi_ck_is_leaf(name)) return 0;
    if (j->used + n <= j->cap) memcpy(j->to + j->used, name, (size_t)n);
    j->used += n;
    j->num++;
    return 0;
}
static void fsdpi_ck_list_leaves(void *arg) {
    fsdpi_ck_list_job *j = (fsdpi_ck_list_job *)arg;
    j->used = j->num = j->has_manifest = 0;
    if (fsdpi_ck_begin(j->disk, "list", j->path)) return;
    (void)fsdpi_ck_end(j->disk, j->disk->ops->list(j->disk->user, j->path, fsdpi_ck_note_leaf, j),
                       j->path);
}

// A failure: of the world; alone it goes to the caller's text and not to a log.
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_ck_fail(fsdpi_ck_io *io, fsdp_status status, const char *format, ...) {
    char text[FSDP_CHECKPOINT_PATH + 512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (io->ck) return fsdp_fail(io->world, status, "%s", text);
    if (io->cap) snprintf(io->text, io->cap, "%s", text);
    return status;
}
// The disk's failure becomes that of a call without a worker.
static fsdp_status fsdpi_ck_told_alone(fsdpi_ck_io *io) {
    return io->disk->status
               ? fsdpi_ck_fail(io, io->disk->status, "[E434] %s: %s", io->call, io->disk->text)
               : FSDP_OK;
}
static fsdp_status fsdpi_ck_do(fsdpi_ck_io *io, fsdpi_ck_job job, void *arg) {
    if (io->ck) return fsdpi_ck_run(io->ck, io->call, job, arg);
    fsdpi_ck_forget(io->disk);
    job(arg);
    return fsdpi_ck_told_alone(io);
}
static fsdp_status fsdpi_ck_broken(fsdpi_ck_io *io, fsdp_status status, const char *name,
                                   const char *why) {
    return fsdpi_ck_fail(io, status, "[E435] %s: %s: %s", io->call, name, why);
}

// Memory that a worker that hangs may still use is left to the end of the process.
static void fsdpi_ck_drop(fsdpi_ck_io *io, fsdpi_ck_room *room) {
    if (!io->ck || !io->ck->stuck) fsdpi_ck_free(io->model, room);
}

// The jobs on the file `path`. open: its error may be that there is no such file.
static fsdp_status fsdpi_ck_open_path(fsdpi_ck_io *io, const char *path) {
    memset(&io->open, 0, sizeof io->open);
    if (path != io->path) snprintf(io->path, sizeof io->path, "%s", path);
    io->open.disk = io->read.disk = io->disk;
    io->open.path = io->read.path = io->path;
    return fsdpi_ck_do(io, fsdpi_ck_try_open, &io->open);
}
static fsdp_status fsdpi_ck_read_path(fsdpi_ck_io *io, void *to, int64_t nbytes) {
    io->read.file = io->open.file;
    io->read.to = to, io->read.at = 0, io->read.nbytes = nbytes;
    return fsdpi_ck_do(io, fsdpi_ck_read_bytes, &io->read);
}
// Also after a failure, whose status this returns then.
static fsdp_status fsdpi_ck_close_path(fsdpi_ck_io *io, fsdp_status status) {
    if (io->ck && io->ck->stuck) return status;
    io->open.quiet = status != 0; // the text of the first failure stays
    fsdp_status closed = fsdpi_ck_do(io, fsdpi_ck_close_file, &io->open);
    return status ? status : closed;
}

/* -------------------------------------------------------------------------------------------- */
// The block of bytes. Each piece is a number of bytes (-1: there is no such piece), then the bytes,
// padded to 8. Pieces: 1 if the path is a file and no directory; the manifest; the index; then of
// each data file its name, its size as 8 bytes, and its header with the 8 bytes before it.

typedef struct fsdpi_ck_bulk {
    fsdpi_ck_room room;
    int64_t used;
} fsdpi_ck_bulk;

// A new piece; NULL data: its bytes come later. Returns where they go, or a failure.
static fsdp_status fsdpi_ck_put(fsdpi_ck_io *io, fsdpi_ck_bulk *b, const void *data, int64_t nbytes,
                                char **where) {
    int64_t padded = nbytes < 0 ? 0 : (nbytes + 7) / 8 * 8;
    fsdp_status status = fsdpi_ck_reserve(io->model, &b->room, b->used + 8 + padded, b->used);
    if (status) return status;
    char *to = (char *)b->room.ptr + b->used;
    memcpy(to, &nbytes, 8);
    memset(to + 8, 0, (size_t)padded);
    if (data && nbytes > 0) memcpy(to + 8, data, (size_t)nbytes);
    if (where) *where = to + 8;
    b->used += 8 + padded;
    return FSDP_OK;
}
// The next piece; its number of bytes.
static int64_t fsdpi_ck_take(const fsdpi_ck_bulk *b, int64_t *at, const char **where) {
    int64_t nbytes = 0;
    if (*at + 8 > b->used) return -1;
    memcpy(&nbytes, (const char *)b->room.ptr + *at, 8);
    *where = (const char *)b->room.ptr + *at + 8;
    *at += 8 + (nbytes < 0 ? 0 : (nbytes + 7) / 8 * 8);
    return nbytes;
}

// A whole file as a piece. there: out: 0: there is no such file (a piece that is none). What has
// its name and is no file is a failure: nobody takes a checkpoint for one without a manifest.
static fsdp_status fsdpi_ck_fetch_text(fsdpi_ck_io *io, fsdpi_ck_bulk *b, const char *dir,
                                       const char *leaf, int *there) {
    char path[FSDP_CHECKPOINT_PATH], *to = NULL;
    *there = 0;
    if (!fsdpi_ck_join(path, dir, leaf))
        return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, dir, "the path is too long");
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    if (io->open.error == ENOENT || io->open.error == ENOTDIR)
        return fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (io->open.error)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                               io->open.error == ELOOP ? strerror(ELOOP) : "it is no regular file");
    *there = 1;
    if (io->open.nbytes > FSDPI_CK_MOST_TEXT)
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, "it has more than 64 MiB");
    if (!status) status = fsdpi_ck_put(io, b, NULL, io->open.nbytes, &to);
    if (!status) status = fsdpi_ck_read_path(io, to, io->open.nbytes);
    return fsdpi_ck_close_path(io, status);
}

// The header of a data file: three pieces.
static fsdp_status fsdpi_ck_fetch_header(fsdpi_ck_io *io, fsdpi_ck_bulk *b, const char *path,
                                         const char *leaf) {
    char why[256] = "", *to = NULL;
    int64_t n = 0;
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    int64_t bytes = io->open.nbytes;
    if (io->open.error)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, strerror(io->open.error));
    status = fsdpi_ck_put(io, b, leaf, (int64_t)strlen(leaf) + 1, NULL);
    if (!status) status = fsdpi_ck_put(io, b, &bytes, 8, NULL);
    if (!status) status = fsdpi_ck_put(io, b, NULL, 8, &to); // grows to the header
    if (!status && bytes >= 8) status = fsdpi_ck_read_path(io, to, 8);
    if (!status && fsdp_safetensors_header_bytes(to, bytes, &n, why, sizeof why))
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, why);
    if (!status && b->used + n > INT64_C(1) << 30)
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                 "with its header all headers have more than 1 GiB");
    b->used -= 16;
    if (!status) status = fsdpi_ck_put(io, b, NULL, 8 + n, &to);
    if (!status) status = fsdpi_ck_read_path(io, to, 8 + n);
    return fsdpi_ck_close_path(io, status);
}

// Names of data files, each once and sorted, behind one another in `names`.
typedef struct fsdpi_ck_leaves {
    fsdpi_ck_room text, list;
    int64_t num;
} fsdpi_ck_leaves;
static int fsdpi_ck_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static fsdp_status fsdpi_ck_leaves_of_dir(fsdpi_ck_io *io, const char *path, fsdpi_ck_leaves *l) {
    fsdpi_ck_list_job *j = &io->list;
    fsdp_status status = FSDP_OK;
    snprintf(io->path, sizeof io->path, "%s", path);
    j->disk = io->disk, j->path = io->path;
    do { // the first pass measures; a directory may grow meanwhile
        j->to = (char *)l->text.ptr, j->cap = l->text.cap;
        status = fsdpi_ck_do(io, fsdpi_ck_list_leaves, j);
        if (!status && j->used > j->cap) status = fsdpi_ck_reserve(io->model, &l->text, j->used, 0);
    } while (!status && j->used > j->cap);
    if (!status)
        status = fsdpi_ck_reserve(io->model, &l->list, (j->num + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    const char **list = (const char **)l->list.ptr, *at = (const char *)l->text.ptr;
    for (l->num = 0; l->num < j->num; at += strlen(at) + 1) list[l->num++] = at;
    qsort((void *)list, (size_t)l->num, sizeof *list, fsdpi_ck_by_text);
    return FSDP_OK;
}

// Reads the manifest or the index that is the piece at `text`; both passes.
static fsdp_status fsdpi_ck_get_manifest(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                         fsdpi_ck_manifest *m, fsdpi_ck_room *room) {
    char why[256] = "";
    memset(m, 0, sizeof *m);
    fsdp_status status = fsdpi_ck_parse_manifest(m, text, nbytes, why, sizeof why);
    if (!status) {
        int64_t files = m->num_files * (int64_t)sizeof(fsdpi_ck_file), crcs = m->num_crcs * 4;
        status = fsdpi_ck_reserve(io->model, room, files + crcs + m->text_bytes + 1, 0);
        if (status) return status;
        m->files = (fsdpi_ck_file *)room->ptr;
        m->crcs = (uint32_t *)(void *)((char *)room->ptr + files);
        m->text = (char *)room->ptr + files + crcs;
        status = fsdpi_ck_parse_manifest(m, text, nbytes, why, sizeof why);
    }
    return status ? fsdpi_ck_broken(io, status, "manifest.json", why) : FSDP_OK;
}
static fsdp_status fsdpi_ck_get_index(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                      fsdpi_ck_index *x, fsdpi_ck_room *room) {
    char why[256] = "";
    memset(x, 0, sizeof *x);
    fsdp_status status = fsdpi_ck_parse_index(x, text, nbytes, why, sizeof why);
    if (!status) {
        int64_t list = (x->num + 1) * (int64_t)sizeof(fsdpi_ck_where);
        status = fsdpi_ck_reserve(io->model, room, list + x->text_bytes + 1, 0);
        if (status) return status;
        x->list = (fsdpi_ck_where *)room->ptr;
        x->text = (char *)room->ptr + list;
        status = fsdpi_ck_parse_index(x, text, nbytes, why, sizeof why);
    }
    return status ? fsdpi_ck_broken(io, status, "model.safetensors.index.json", why) : FSDP_OK;
}

// The data files that a manifest or an index names.
static fsdp_status fsdpi_ck_told_leaves(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                        int is_index, fsdpi_ck_leaves *l) {
    fsdpi_ck_manifest m;
    fsdpi_ck_index x;
    fsdp_status status = is_index ? fsdpi_ck_get_index(io, text, nbytes, &x, &l->text)
                                  : fsdpi_ck_get_manifest(io, text, nbytes, &m, &l->text);
    if (status) return status;
    int64_t num = is_index ? x.num : m.num_files;
    status = fsdpi_ck_reserve(io->model, &l->list, (num + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    const char **list = (const char **)l->list.ptr;
    for (int64_t i = 0; i < num; i++) list[i] = is_index ? x.list[i].leaf : m.files[i].name;
    qsort((void *)list, (size_t)num, sizeof *list, fsdpi_ck_by_text);
    l->num = 0;
    for (int64_t i = 0; i < num; i++)
        if (!i || strcmp(list[l->num - 1], list[i]) != 0) list[l->num++] = list[i];
    return FSDP_OK;
}

// The part of a path behind its last slash.
static const char *fsdpi_ck_last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static fsdp_status fsdpi_ck_fetch_dir(fsdpi_ck_io *io, const char *path, fsdpi_ck_bulk *b,
                                      fsdpi_ck_leaves *l) {
    char file[FSDP_CHECKPOINT_PATH];
    int manifest = 0, index = 0, pickled = 0;
    int64_t manifest_at = b->used;
    fsdp_status status = fsdpi_ck_fetch_text(io, b, path, "manifest.json", &manifest);
    int64_t index_at = b->used;
    if (!status && !manifest)
        status = fsdpi_ck_fetch_text(io, b, path, "model.safetensors.index.json", &index);
    else if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (!status && (manifest || index)) {
        int64_t at = index ? index_at : manifest_at, nbytes;
        const char *text = NULL;
        nbytes = fsdpi_ck_take(b, &at, &text);
        status = fsdpi_ck_told_leaves(io, text, nbytes, index, l);
    } else if (!status) {
        status = fsdpi_ck_leaves_of_dir(io, path, l);
        if (!status && io->list.has_manifest)
            status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                     "there is a manifest.json that cannot be opened: does it "
                                     "point at nothing?");
        int64_t used = b->used;
        if (!status && !l->num) {
            status = fsdpi_ck_fetch_text(io, b, path, ".metadata", &pickled);
            b->used = used;
            if (!status)
                status = pickled ? fsdpi_ck_broken(io, FSDP_ERR_UNSUPPORTED, path,
                                                   "a checkpoint of PyTorch in pickled form: save "
                                                   "it with HuggingFaceStorageWriter("
                                                   "save_distributed=True)")
                                 : fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                                   "it has no manifest.json and no .safetensors "
                                                   "file: is it a checkpoint?");
        }
    }
    for (int64_t i = 0; i < l->num && !status; i++) {
        const char *leaf = ((const char *const *)l->list.ptr)[i];
        if (!fsdpi_ck_join(file, path, leaf))
            return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, path, "the path is too long");
        status = fsdpi_ck_fetch_header(io, b, file, leaf);
    }
    return status;
}

/* Rank 0, or a process alone: all headers of what is at path. */
static fsdp_status fsdpi_ck_fetch(fsdpi_ck_io *io, const char *path, fsdpi_ck_bulk *b) {
    fsdpi_ck_leaves l;
    memset(&l, 0, sizeof l);
    b->used = 0;
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    if (io->open.error == ENOENT || io->open.error == ENOTDIR)
        return fsdpi_ck_broken(io, FSDP_ERR_IO, path, "there is no such file or directory");
    int64_t is_file = !io->open.error;
    if (is_file) status = fsdpi_ck_close_path(io, FSDP_OK);
    if (!status) status = fsdpi_ck_put(io, b, &is_file, 8, NULL);
    if (!status && !is_file) {
        status = fsdpi_ck_fetch_dir(io, path, b, &l);
    } else if (!status) {
        status = fsdpi_ck_put(io, b, NULL, -1, NULL);
        if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
        if (!status) status = fsdpi_ck_fetch_header(io, b, path, fsdpi_ck_last_part(path));
    }
    fsdpi_ck_drop(io, &l.text);
    fsdpi_ck_drop(io, &l.list);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// What the block says.

typedef struct fsdpi_ck_part { // a data file
    const char *name;
    int64_t bytes, header; // of the file; 8 + N
    int64_t first, num;    // its entries
    const char *text;      // of the header, from the first byte of the file on
    const uint32_t *crcs;  // NULL: nothing tells them
} fsdpi_ck_part;

typedef struct fsdpi_ck_opened {
    fsdpi_ck_bulk bulk;
    fsdpi_ck_room told, work; // of manifest or index; entries, boxes, parts, names
    int64_t step;             // -1: no manifest tells it
    int64_t world;            // ranks that saved it; 0: not told
    int64_t num_parts, num_boxes, total_bytes;
    fsdpi_ck_part *parts;
    fsdp_safetensors_entry *entries;
    fsdpi_ck_box *boxes; // sorted by name and start
    const char *dir;     // the path
    int64_t is_file;     // 1: the path is the only part itself
} fsdpi_ck_opened;

static void fsdpi_ck_opened_end(fsdpi_ck_io *io, fsdpi_ck_opened *o) {
    fsdpi_ck_drop(io, &o->bulk.room);
    fsdpi_ck_drop(io, &o->told);
    fsdpi_ck_drop(io, &o->work);
}

// One data file of the block: its pieces, parsed; measure if there is no room yet.
static fsdp_status fsdpi_ck_parse_part(fsdpi_ck_io *io, fsdpi_ck_opened *o, int64_t *at, int pass,
                                       char **text, int64_t *chars) {
    const char *name = "", *size = NULL, *header = NULL;
    char why[256] = "";
    fsdp_safetensors_info info;
    int64_t bytes = 0;
    (void)fsdpi_ck_take(&o->bulk, at, &name);
    (void)fsdpi_ck_take(&o->bulk, at, &size);
    memcpy(&bytes, size, 8);
    int64_t n = fsdpi_ck_take(&o->bulk, at, &header);
    fsdp_status status = fsdp_safetensors_parse(header + 8, n - 8, bytes - n,
                                                pass ? o->entries + o->num_boxes : NULL, *text,
                                                &info, why, sizeof why);
    if (status) return fsdpi_ck_broken(io, status, name, why);
    if (pass) {
        fsdpi_ck_part *p = &o->parts[o->num_parts];
        memset(p, 0, sizeof *p);
        p->name = name, p->bytes = bytes, p->header = n, p->text = header;
        p->first = o->num_boxes, p->num = info.num_entries;
        *text += info.text_bytes;
        for (int64_t i = 0; i < p->num; i++) {
            o->boxes[o->num_boxes + i].entry = o->entries + o->num_boxes + i;
            o->boxes[o->num_boxes + i].file = (int32_t)o->num_parts;
        }
    }
    o->total_bytes += bytes - n;
    o->num_parts++;
    o->num_boxes += info.num_entries;
    *chars += info.text_bytes;
    return FSDP_OK;
}

// A manifest: the files have the sizes, headers and ranks that it tells.
static fsdp_status fsdpi_ck_match_manifest(fsdpi_ck_io *io, fsdpi_ck_opened *o, const char *text,
                                           int64_t nbytes) {
    fsdpi_ck_manifest m;
    fsdp_status status = fsdpi_ck_get_manifest(io, text, nbytes, &m, &o->told);
    if (status) return status;
    o->step = m.step;
    o->world = m.world;
    for (int64_t i = 0; i < m.num_files; i++) { // the same order: by name
        fsdpi_ck_part *p = &o->parts[i];
        const fsdpi_ck_file *f = &m.files[i];
        if (p->bytes != f->bytes || p->header != f->header + 8)
            return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, p->name,
                                   p->bytes < f->bytes ? "the file is cut off: the manifest tells "
                                                         "a larger one"
                                                       : "its size is not that of the manifest");
        if (fsdp_crc32c(0, p->text, p->header) != f->header_crc)
            return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, p->name,
                                   "its header is not the one that the manifest was written for");
        p->crcs = f->crcs;
    }
    return FSDP_OK;
}

static int fsdpi_ck_by_where(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_where *)a)->name, ((const fsdpi_ck_where *)b)->name);
}
// An index: every name is in the file that it names, and every tensor of the files is named.
static fsdp_status fsdpi_ck_match_index(fsdpi_ck_io *io, fsdpi_ck_opened *o, const char *text,
                                        int64_t nbytes) {
    fsdpi_ck_index x;
    char why[320];
    fsdp_status status = fsdpi_ck_get_index(io, text, nbytes, &x, &o->told);
    if (status) return status;
    qsort(x.list, (size_t)x.num, sizeof *x.list, fsdpi_ck_by_where);
    for (int64_t i = 0, k = 0; i < x.num || k < o->num_boxes; i++, k++) { // both by name
        const char *told = i < x.num ? x.list[i].name : NULL;
        const char *there = k < o->num_boxes ? o->boxes[k].entry->name : NULL;
        int order = !told ? 1 : !there ? -1 : strcmp(told, there);
        if (!order && strcmp(x.list[i].leaf, o->parts[o->boxes[k].file].name) == 0) continue;
        snprintf(why, sizeof why,
                 order > 0   ? "tensor '%.200s' is in a file, and the index does not name it"
                 : order < 0 ? "it names tensor '%.200s', which is in no file"
                             : "tensor '%.200s' is in another file than the index says",
                 order > 0 ? there : told);
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, "model.safetensors.index.json", why);
    }
    return FSDP_OK;
}

/* All ranks: files, entries and boxes, checked. */
static fsdp_status fsdpi_ck_understand(fsdpi_ck_io *io, fsdpi_ck_opened *o) {
    const char *manifest = NULL, *index = NULL, *form = NULL;
    int64_t at = 0, chars = 0;
    o->step = -1, o->world = 0;
    (void)fsdpi_ck_take(&o->bulk, &at, &form);
    memcpy(&o->is_file, form, 8);
    int64_t manifest_bytes = fsdpi_ck_take(&o->bulk, &at, &manifest);
    int64_t index_bytes = fsdpi_ck_take(&o->bulk, &at, &index), files_at = at;
    fsdp_status status = FSDP_OK;
    for (int pass = 0; pass < 2 && !status; pass++) {
        int64_t entries = (o->num_boxes + 1) * (int64_t)sizeof *o->entries;
        int64_t boxes = (o->num_boxes + 1) * (int64_t)sizeof *o->boxes;
        int64_t parts = (o->num_parts + 1) * (int64_t)sizeof *o->parts;
        char *text = NULL;
        if (pass)
            status = fsdpi_ck_reserve(io->model, &o->work, entries + boxes + parts + chars + 1, 0);
        if (status) return status;
        if (pass) {
            text = (char *)o->work.ptr;
            o->entries = (fsdp_safetensors_entry *)(void *)text;
            o->boxes = (fsdpi_ck_box *)(void *)(text + entries);
            o->parts = (fsdpi_ck_part *)(void *)(text + entries + boxes);
            text += entries + boxes + parts;
        }
        o->num_boxes = o->num_parts = o->total_bytes = chars = 0;
        for (at = files_at; at < o->bulk.used && !status;)
            status = fsdpi_ck_parse_part(io, o, &at, pass, &text, &chars);
    }
    if (!status && manifest_bytes >= 0)
        status = fsdpi_ck_match_manifest(io, o, manifest, manifest_bytes);
    if (status) return status;
    fsdpi_ck_room names = {NULL, 0};
    status = fsdpi_ck_reserve(io->model, &names, (o->num_parts + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    for (int64_t i = 0; i < o->num_parts; i++) ((const char **)names.ptr)[i] = o->parts[i].name;
    fsdpi_ck_tiling tiling = {(const char *const *)names.ptr, manifest_bytes < 0, ""};
    status = fsdpi_ck_tile(&tiling, o->boxes, (int)o->num_boxes);
    fsdpi_ck_free(io->model, &names);
    if (status) return fsdpi_ck_broken(io, status, o->dir, tiling.why);
    return index_bytes >= 0 ? fsdpi_ck_match_index(io, o, index, index_bytes) : FSDP_OK;
}

/* The boxes of a tensor: the first of them, and how many. 0: there is no such tensor. */
static int64_t fsdpi_ck_boxes_of(const fsdpi_ck_opened *o, const char *name, int64_t *first) {
    int64_t low = 0, high = o->num_boxes;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(o->boxes[middle].entry->name, name) < 0) low = middle + 1;
        else high = middle;
    }
    *first = low;
    while (high < o->num_boxes && strcmp(o->boxes[high].entry->name, name) == 0) high++;
    return high - low;
}
