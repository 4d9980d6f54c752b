# Plot of bench_host.c:  gnuplot -e "csv='build/bench_host.csv'; out='bench_host.png'" bench/bench_host.gp
# SPDX-License-Identifier: MIT
if (!exists("csv")) csv = 'build/bench_host.csv'
if (!exists("out")) out = 'bench_host.png'
set datafile separator ','
set terminal pngcairo size 1100,450 font 'sans,10'
set output out
set logscale x 2
set xlabel 'ranks'
set ylabel 'ns per unit of 12 parameters, median'
set yrange [0:*]
set grid
set key outside right
# Lines of one dtype, mode and call.
pick(d, m, c) = sprintf("< awk -F, '$1 == \"%s\" && $2 == \"%s\" && $4 == \"%s\"' '%s'", d, m, c, csv)
set title 'host cost of the hooks; device and comm do nothing'
plot for [c in 'forward backward'] for [m in 'inline streams'] for [d in 'f32 bf16'] pick(d, m, c) \
    using 3:6 with linespoints title c.' '.m.' '.d, \
    200 with lines dashtype 2 linecolor 'gray' title 'goal forward', \
    400 with lines dashtype 3 linecolor 'gray' title 'goal backward'
