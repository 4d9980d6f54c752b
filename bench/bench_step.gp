# Plot of fsdp_step.py, or of bench_step.c alone:
#   gnuplot -e "csv='build/fsdp_step.csv'; png='build/fsdp_step.png'" bench/bench_step.gp
# SPDX-License-Identifier: MIT
if (!exists("csv")) csv = 'build/fsdp_step.csv'
if (!exists("png")) png = 'build/fsdp_step.png'
set datafile separator ','
set terminal pngcairo noenhanced size 1100,550 font 'sans,10'
set output png
set style data histograms
set style histogram clustered
set style fill solid 0.8
set xtics rotate by -35
set logscale y 10
set grid ytics
set key outside below
columns = system("head -1 ".csv)
has_torch = strstrt(columns, 'torch') > 0
name = "strcol('model').' '.strcol('case').' W='.strcol('world').' lanes='.strcol('lanes')"
set multiplot layout 1,2
set title 'milliseconds of a step, median'
if (has_torch) {
    plot csv using ((column('pass_us') + column('optim_us')) / 1e3):xtic(@name) title 'fsdp.h', \
         csv using ((column('torch_pass_us') + column('torch_optim_us')) / 1e3) title 'PyTorch', \
         csv using ((column('plain_us') + column('plain_optim_us')) / 1e3) title 'fsdp.h, not sharded', \
         csv using ((column('torch_plain_us') + column('torch_plain_optim_us')) / 1e3) \
             title 'PyTorch, not sharded'
    set title 'microseconds that sharding adds to each unit'
    plot csv using 'extra_us':xtic(@name) title 'fsdp.h', csv using 'torch_extra_us' title 'PyTorch'
} else {
    plot csv using ((column('pass_us') + column('optim_us')) / 1e3):xtic(@name) title 'sharded', \
         csv using ((column('plain_pass_us') + column('plain_optim_us')) / 1e3) title 'not sharded'
    set title 'microseconds that sharding adds to each unit'
    plot csv using 'extra_us_per_unit':xtic(@name) title 'sharded'
}
unset multiplot
