# Plot of bench_shm.c:
#   gnuplot -e "csv='build/bench_shm.csv'; png='build/bench_shm.png'" bench/bench_shm.gp
if (!exists("csv")) csv = 'build/bench_shm.csv'
if (!exists("png")) png = 'build/bench_shm.png'
set datafile separator ','
set terminal pngcairo noenhanced size 1100,450 font 'sans,10'
set output png
set logscale xy 2
set format x '%.0b%BB'
set xlabel 'bytes of the full side'
set grid
# The rows of one operation and world; the first line of the file is skipped.
pick(op, w, y) = (strcol(1) eq op && column(2) == w) ? column(y) : NaN
set multiplot layout 1,2
set key left top
set format y '%.0f'
set ylabel 'microseconds, median'
set title 'time of one collective'
plot for [op in 'all_gather reduce_scatter'] for [w in '2 4'] csv every ::1 \
    using 3:(pick(op, int(w), 5)) with linespoints title op.', W='.w
set key right top
set format y '%g'
set ylabel 'time / time of memcpy with the same memory traffic'
set title 'beside memcpy'
plot for [op in 'all_gather reduce_scatter'] for [w in '2 4'] csv every ::1 \
    using 3:(pick(op, int(w), 9)) with linespoints title op.', W='.w, \
    1.3 with lines dashtype 2 title 'goal 1.3'
unset multiplot
