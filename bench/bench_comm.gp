# Plot of bench_comm.c:
#   gnuplot -e "csv='build/bench_comm.csv'; png='build/bench_comm.png'" bench/bench_comm.gp
# SPDX-License-Identifier: MIT
if (!exists("csv")) csv = 'build/bench_comm.csv'
if (!exists("png")) png = 'build/bench_comm.png'
set datafile separator ','
set terminal pngcairo noenhanced size 1500,900 font 'sans,10'
set output png
set logscale x 2
set logscale y 10
set format x '%.0b%BB'
set format y '%g'
set xlabel 'bytes of the full side'
set ylabel 'microseconds, median'
set grid
set key left top Left reverse
# The rows of one operation, world and rival; the first line of the file is skipped.
pick(op, w, who) = (strcol(1) eq op && column(2) == w && strcol(4) eq who) ? column(7) : NaN
ops = 'all_gather reduce_scatter all_reduce'
rivals = 'shm gloo ring tcp memcpy'
set datafile missing NaN
set multiplot layout 2,3
do for [w in '2 4'] {
    do for [op in ops] {
        set title op.', W='.w
        plot for [i=1:5] csv every ::1 using 3:(pick(op, int(w), word(rivals, i))) \
            with linespoints linecolor i pointtype i title word(rivals, i)
    }
}
unset multiplot
