/* gpt_plot.h - the curve of the losses: in the terminal, of Unicode blocks, and as an SVG

   Included by gpt_host.h. SPDX-License-Identifier: MIT */
#ifndef GPT_PLOT_H
#define GPT_PLOT_H

enum { PLOT_COLUMNS = 64, PLOT_ROWS = 10, EIGHTHS = 8 }; // characters
enum { SVG_LEFT = 60, SVG_RIGHT = 880, SVG_TOP = 50, SVG_BOTTOM = 490, SVG_POINTS = 2000 };
enum { MEAN_SIDE = 10 }; // losses at each side of a step that its mean takes

/* Looked at, and a number that can be drawn. */
static int has_loss(const trainer *t, int step) {
    return t->losses[step] >= 0.0 && t->losses[step] < 1e30;
}

/* Writes the path of the picture: next to the csv, or else in build/, or else in this folder. */
static void plot_path(const trainer *t, char *path, size_t size) {
    struct stat st;
    const char *csv = t->j->opt.csv_path;
    if (csv) {
        const char *slash = strrchr(csv, '/');
        const char *dot = strrchr(csv, '.');
        const int stem = dot && dot > csv && (!slash || dot > slash + 1) ? (int)(dot - csv)
                                                                         : (int)strlen(csv);
        snprintf(path, size, "%.*s.svg", stem, csv);
        return;
    }
    if (access("fsdp.h", R_OK) == 0) (void)mkdir("build", 0777); // in the project's own folder
    snprintf(path, size, "%s",
             stat("build", &st) == 0 && S_ISDIR(st.st_mode) ? "build/loss.svg" : "loss.svg");
}

/* Means of the losses of each column; a column without losses is as the one before it. */
static int column_means(const trainer *t, double *mean, double *lo, double *hi) {
    const int steps = t->j->opt.steps, columns = steps < PLOT_COLUMNS ? steps : PLOT_COLUMNS;
    int filled = 0;
    for (int c = 0; c < columns; c++) {
        double sum = 0.0;
        int count = 0;
        for (int s = (int)((int64_t)steps * c / columns); s < (int64_t)steps * (c + 1) / columns;
             s++) {
            if (has_loss(t, s)) sum += t->losses[s], count++;
        }
        if (count == 0 && filled == 0) continue; // before the first one
        mean[filled] = count ? sum / count : mean[filled - 1];
        if (filled == 0 || mean[filled] < *lo) *lo = mean[filled];
        if (filled == 0 || mean[filled] > *hi) *hi = mean[filled];
        filled++;
    }
    return filled;
}

/* As high as a column's mean is between the lowest one, an eighth of a row, and the highest one. */
static void draw_losses(const trainer *t) {
    static const char *const blocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    double mean[PLOT_COLUMNS], lo = 0.0, hi = 0.0;
    const int columns = column_means(t, mean, &lo, &hi);
    char last[32];
    if (columns == 0) return;
    printf("\nloss, nats per byte; a column is the mean of %.4g steps\n",
           (double)t->j->opt.steps / columns);
    for (int row = PLOT_ROWS - 1; row >= 0; row--) {
        if (row == PLOT_ROWS - 1) printf("%6.2f ┤", hi);
        else if (row == 0) printf("%6.2f ┤", lo);
        else printf("       │");
        for (int c = 0; c < columns; c++) {
            const double share = hi > lo ? (mean[c] - lo) / (hi - lo) : 1.0;
            const int height = 1 + (int)(share * (PLOT_ROWS * EIGHTHS - 1) + 0.5) - row * EIGHTHS;
            fputs(blocks[height < 0 ? 0 : height > EIGHTHS ? EIGHTHS : height], stdout);
        }
        printf("\n");
    }
    printf("       └");
    for (int c = 0; c < columns; c++) printf("─");
    printf("\n        1%*s\n", columns - 1, columns > 8 ? commas(last, t->j->opt.steps) : "");
}

/* 1, 2 or 5 times a power of ten, so that at most eight of them are in the range. */
static double tick_of(double range) {
    double tick = pow(10.0, floor(log10(range / 8.0)));
    for (int k = 0; range / tick > 8.0; k = (k + 1) % 3) tick *= k == 1 ? 2.5 : 2.0;
    return tick;
}

typedef struct {
    double lo, hi; // losses
    int steps;
} svg_frame;

static double svg_x(const svg_frame *f, double step) {
    return SVG_LEFT + (SVG_RIGHT - SVG_LEFT) * (f->steps > 1 ? (step - 1) / (f->steps - 1) : 0.5);
}
static double svg_y(const svg_frame *f, double loss) {
    return SVG_BOTTOM - (SVG_BOTTOM - SVG_TOP) * (loss - f->lo) / (f->hi - f->lo);
}

static void write_ticks(const svg_frame *f, FILE *svg) {
    const double dy = tick_of(f->hi - f->lo), dx = tick_of(f->steps > 8 ? f->steps : 8);
    char text[32];
    for (double y = ceil(f->lo / dy) * dy; y <= f->hi; y += dy) {
        fprintf(svg, "<path class='grid' d='M%d %.1fH%d'/>", SVG_LEFT, svg_y(f, y), SVG_RIGHT);
        fprintf(svg, "<text x='%d' y='%.1f' text-anchor='end'>%.4g</text>\n", SVG_LEFT - 8,
                svg_y(f, y) + 5, y);
    }
    for (double x = 1.0; x <= f->steps; x = (floor(x / dx) + 1.0) * dx)
        fprintf(svg, "<text x='%.1f' y='%d' text-anchor='middle'>%s</text>\n", svg_x(f, x),
                SVG_BOTTOM + 20, commas(text, (int64_t)x));
}

/* Returns the next step on one side, way 1 or -1, whose loss is known, or a step out of range. */
static int next_loss(const trainer *t, int step, int way) {
    const int steps = t->j->opt.steps;
    do step += way;
    while (step >= 0 && step < steps && !has_loss(t, step));
    return step;
}

/* Returns the mean of equally many losses before and after the step, so that it neither lags nor
   leads: fewer near both ends. */
static double centred_mean(const trainer *t, int step) {
    double sum = t->losses[step];
    int count = 1, before = step, after = step;
    for (int k = 0; k < MEAN_SIDE; k++, count += 2) {
        before = next_loss(t, before, -1);
        after = next_loss(t, after, 1);
        if (before < 0 || after >= t->j->opt.steps) break;
        sum += t->losses[before] + t->losses[after];
    }
    return sum / count;
}

/* At most 2000 points of the losses that were looked at, or of means around them. */
static void write_line(const trainer *t, const svg_frame *f, FILE *svg, int smooth) {
    const int stride = f->steps / t->j->opt.log_every / SVG_POINTS + 1;
    fprintf(svg, "<polyline class='%s' points='", smooth ? "mean" : "each");
    for (int s = next_loss(t, -1, 1), count = 0; s < f->steps; s = next_loss(t, s, 1)) {
        if (count++ % stride) continue;
        const double loss = smooth ? centred_mean(t, s) : t->losses[s];
        fprintf(svg, "%.1f,%.2f\n", svg_x(f, s + 1), svg_y(f, loss));
    }
    fputs("'/>\n", svg);
}

static void write_svg(const trainer *t, FILE *svg) {
    svg_frame f = {1e30, -1e30, t->j->opt.steps};
    for (int s = 0; s < f.steps; s++) {
        if (!has_loss(t, s)) continue;
        if (t->losses[s] < f.lo) f.lo = t->losses[s];
        if (t->losses[s] > f.hi) f.hi = t->losses[s];
    }
    if (!(f.hi - f.lo > 1e-6)) f.lo -= 0.5, f.hi += 0.5; // one step, or none
    fprintf(svg,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 900 540' "
            "font-family='sans-serif' font-size='14'>\n"
            "<style>.back { fill: #fff } text { fill: #1f2328 } .grid { stroke: #d9dee3 }\n"
            ".each { stroke: #a9bfd8 } .mean { stroke: #1f5fa8; stroke-width: 2 }\n"
            ".each, .mean { fill: none }\n"
            "@media (prefers-color-scheme: dark) {\n"
            ".back { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d }\n"
            ".each { stroke: #3d5a7c } .mean { stroke: #6cb0ff }\n}</style>\n"
            "<rect class='back' width='900' height='540'/>\n"
            "<text x='%d' y='30' font-size='18'>" PROGRAM
            " on %d rank%s: loss, nats per byte</text>\n"
            "<text x='%d' y='30' text-anchor='end'>each step, and the mean of up to %d around it"
            "</text>\n"
            "<text x='%d' y='530' text-anchor='end'>step</text>\n",
            SVG_LEFT, t->num_ranks, t->num_ranks == 1 ? "" : "s", SVG_RIGHT, 2 * MEAN_SIDE + 1,
            SVG_RIGHT);
    write_ticks(&f, svg);
    write_line(t, &f, svg, 0);
    write_line(t, &f, svg, 1);
    fputs("</svg>\n", svg);
}

/* The loss curve, in the terminal and in a file. */
static void show_curve(const trainer *t) {
    char path[PATH_MAX];
    if (t->first && !t->csv) return; // the losses before are not known
    draw_losses(t);
    plot_path(t, path, sizeof path);
    FILE *svg = fopen(path, "w");
    if (svg) write_svg(t, svg);
    const int bad = svg ? ferror(svg) : 1;
    if ((svg && fclose(svg)) || bad)
        printf("\nno picture of the losses: %s: %s\n", path, strerror(errno));
    else printf("\nloss curve: %s\n", path);
}

#endif // GPT_PLOT_H
