# The example of the specification, by its rules alone: two data files and a manifest, byte for byte.   usage: example.py OUTDIR
# SPDX-License-Identifier: MIT
import json, os, struct, sys
def crc32c(b, c=0):
    c ^= 0xFFFFFFFF
    for x in b:
        c ^= x
        for _ in range(8): c = (c >> 1) ^ 0x82F63B78 if c & 1 else c >> 1
    return c ^ 0xFFFFFFFF
assert crc32c(b'123456789') == 0xe3069283
ORDER = ['I64', 'F64', 'F32', 'I32', 'BF16', 'F16', 'I16', 'I8', 'U8']
def data_file(items, writer, writers):   # items: name, dtype, shape, offset, global shape, bytes
    items = sorted(items, key=lambda t: (ORDER.index(t[1]), t[0].encode()))
    info = '{' + ','.join('%s:{"saved_offsets":%s,"global_shape":%s}' % (json.dumps(n, ensure_ascii=False), json.dumps(o, separators=(',', ':')), json.dumps(g, separators=(',', ':'))) for n, d, s, o, g, b in items) + '}'
    md = {'DCP_SHARDING_INFO': info, 'DCP_VERSION': '1.0', 'format': 'pt', 'fsdp.writer': '%d/%d' % (writer, writers)}
    h = '{"__metadata__":{' + ','.join('%s:%s' % (json.dumps(k), json.dumps(md[k], ensure_ascii=False)) for k in sorted(md)) + '}'
    at = 0
    for n, d, s, o, g, b in items:
        h += ',%s:{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}' % (json.dumps(n, ensure_ascii=False), d, json.dumps(s, separators=(',', ':')), at, at + len(b)); at += len(b)
    h = (h + '}').encode(); h += b' ' * (-len(h) % 8)
    return struct.pack('<Q', len(h)) + h, b''.join(t[5] for t in items)
def manifest(step, world, files):
    t = '{"fsdp_checkpoint":1,\n"step":%d,\n"world":%d,\n"block":1048576,\n"files":[\n' % (step, world)
    t += ',\n'.join('{"name":"%s","bytes":%d,"header":%d,"header_crc":"%08x","crc":"%s"}' % (n, len(h) + len(d), len(h) - 8, crc32c(h), ''.join('%08x' % crc32c(d[i:i + (1 << 20)]) for i in range(0, len(d), 1 << 20))) for n, h, d in files)
    t += '\n]'; return t + ',\n"crc32c":"%08x"}\n' % crc32c(t.encode())
out = sys.argv[1]; os.makedirs(out + '/step-00000017', exist_ok=True)
f = lambda *v: struct.pack('<%df' % len(v), *v)
R0 = [('h.0.w', 'F32', [2, 2], [0, 0], [3, 2], f(0, 1, 2, 3)), ('optim.state.h.0.w.exp_avg', 'F32', [2, 2], [0, 0], [3, 2], f(.5, .5, .5, .5)), ('optim.state.h.0.w.exp_avg_sq', 'F32', [2, 2], [0, 0], [3, 2], f(.25, .25, .25, .25)), ('optim.state.h.0.w.step', 'F64', [], [], [], struct.pack('<d', 17)), ('h.0.b', 'BF16', [1], [0], [2], bytes.fromhex('803f')), ('fsdp.blob.loader', 'U8', [3], [0], [3], b'abc')]
R1 = [('h.0.w', 'F32', [1, 2], [2, 0], [3, 2], f(4, 5)), ('optim.state.h.0.w.exp_avg', 'F32', [1, 2], [2, 0], [3, 2], f(.5, .5)), ('optim.state.h.0.w.exp_avg_sq', 'F32', [1, 2], [2, 0], [3, 2], f(.25, .25)), ('h.0.b', 'BF16', [1], [1], [2], bytes.fromhex('00c0')), ('fsdp.blob.rng.1', 'U8', [2], [0], [2], b'\1\2')]
files = []
for i, r in enumerate((R0, R1)):
    n = 'shard-%05d-model-00001-of-00001.safetensors' % (i + 1); h, d = data_file(r, i + 1, 2); files.append((n, h, d)); open(out + '/step-00000017/' + n, 'wb').write(h + d)
m = manifest(17, 2, files); open(out + '/step-00000017/manifest.json', 'w').write(m); print(m)
for n, h, d in files: print(n, len(h), len(d), h[8:].decode())
