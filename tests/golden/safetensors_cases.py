# Which small files safetensors 0.8.0 takes, and what it answers: golden data for the reader of fsdp_checkpoint.h
# usage: safetensors_cases.py OUT.txt      (the reference's error text may name another of two tensors in another run)
# SPDX-License-Identifier: MIT
import json, struct, sys, safetensors, warnings
from safetensors import deserialize
out = open(sys.argv[1], 'w')
out.write('fsdp-golden 1 safetensors\n# %s; case NAME / verdict ok|CLASS / note TEXT / tensors N then name dtype begin end ndim shape.. / hex BYTES\n' % safetensors.__version__)
def pack(h, data=b'', n=None):
    if isinstance(h, str): h = h.encode()
    return struct.pack('<Q', len(h) if n is None else n) + h + data
def case(name, raw, ours=None, note=None):
    try:
        t = deserialize(raw); verdict = 'ok'
    except Exception as e:
        verdict = 'bad'
        t = None; full = str(e)
    out.write('\ncase %s\nverdict %s\n' % (name, verdict))
    if ours: out.write('ours %s\n' % ours)
    if note: out.write('note %s\n' % note)
    if t is not None:
        n = struct.unpack('<Q', raw[:8])[0]; h = json.loads(raw[8:8+n].decode(), strict=False)
        ts = [(k, v if isinstance(v, dict) else dict(zip(('dtype', 'shape', 'data_offsets'), v))) for k, v in h.items() if k != '__metadata__']
        out.write('tensors %d\n' % len(ts))
        for k, v in sorted(ts): out.write('t %s %s %d %d %d %s\n' % (k.encode('unicode_escape').decode().replace(' ', '\\x20'), v['dtype'], v['data_offsets'][0], v['data_offsets'][1], len(v['shape']), ' '.join(map(str, v['shape']))))
    else: out.write('text %s\n' % full)
    out.write('hex %s\n' % raw.hex() if len(raw) < 3000 else 'long %d\n' % len(raw))
d16 = bytes(range(16))
T = lambda dt='I32', sh='[2,2]', off='[0,16]', extra='': '{"t":{"dtype":"%s","shape":%s,"data_offsets":%s%s}}' % (dt, sh, off, extra)
case('one', pack(T(), d16))
case('spec_example', pack('{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]}}  ', bytes.fromhex('0000803f000000c0803f')))
case('empty_object', pack('{}      ')); case('empty_file', b''); case('seven_bytes', b'\1' * 7); case('eight_bytes', struct.pack('<Q', 60))
case('n_zero', struct.pack('<Q', 0)); case('n_100000001', struct.pack('<Q', 100000001) + b'{}'); case('n_all_ff', b'\xff' * 8 + b'{}'); case('n_past_end', pack('{}', n=3))
case('not_utf8', pack(b'\xff')); case('not_utf8_in_name', pack(b'{"t\xff":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16))
case('open_brace', pack('{')); case('array', pack('[]')); case('trailing_text', pack('{} x')); case('null', pack('null')); case('two_objects', pack('{}{}'))
case('spaces_before', pack('  \t\r\n' + T(), d16)); case('spaces_after', pack(T() + '  \t\r\n', d16)); case('nul_after', pack(T().encode() + b'\0', d16))
case('spaces_inside', pack('{ "t" : { "dtype" : "I32" , "shape" : [ 2 , 2 ] , "data_offsets" : [ 0 , 16 ] } }', d16))
case('trailing_comma', pack('{"t":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]},}', d16)); case('comment', pack('/*x*/' + T(), d16)); case('bom', pack(b'\xef\xbb\xbf' + T().encode(), d16))
for nm, sh in [('negative', '[-2,2]'), ('fraction', '[2.0,2]'), ('exponent', '[2e0,2]'), ('leading_zero', '[02,2]'), ('plus', '[+2,2]'), ('string', '["2",2]'), ('null', 'null'), ('u64max', '[18446744073709551615]'), ('over_u64', '[18446744073709551616]'), ('minus_zero', '[-0,2]'), ('overflow_zero', '[9223372036854775808,4,0]'), ('zero_overflow', '[0,9223372036854775808,4]'), ('prod_overflow', '[2,18446744073709551614]'), ('byte_overflow', '[2,9223372036854775807]')]: case('shape_' + nm, pack(T(sh=sh), d16))
case('shape_zero', pack(T(sh='[2,0]', off='[0,0]'))); case('shape_scalar', pack(T(sh='[]', off='[0,4]'), d16[:4])); case('shape_40_dims', pack(T(sh='[' + ','.join(['1'] * 40) + ']', off='[0,4]'), d16[:4]), None, 'UNSUPPORTED where that tensor is asked for')
for dt in ['i32', 'INT32', 'F8', 'U4', '', 'F4 ', 'C64', 'C128']: case('dtype_%s' % (dt.replace(' ', '_') or 'empty'), pack(T(dt=dt, sh='[2]', off='[0,16]'), d16))
for dt, n in [('BOOL', 1), ('U8', 1), ('I8', 1), ('F8_E5M2', 1), ('F8_E4M3', 1), ('F8_E8M0', 1), ('F8_E4M3FNUZ', 1), ('F8_E5M2FNUZ', 1), ('I16', 2), ('U16', 2), ('F16', 2), ('BF16', 2), ('I32', 4), ('U32', 4), ('F32', 4), ('F64', 8), ('I64', 8), ('U64', 8)]: case('known_' + dt, pack(T(dt=dt, sh='[2]', off='[0,%d]' % (2 * n)), d16[:2 * n]))
case('f4_even', pack(T(dt='F4', sh='[4]', off='[0,2]'), d16[:2])); case('f4_odd', pack(T(dt='F4', sh='[3]', off='[0,2]'), d16[:2])); case('f6', pack(T(dt='F6_E2M3', sh='[4]', off='[0,3]'), d16[:3]))
for nm, o in [('one', '[0]'), ('three', '[0,16,16]'), ('hole_front', '[4,20]'), ('reversed', '[16,0]'), ('short', '[0,4]'), ('negative', '[-4,12]'), ('huge', '[0,18446744073709551615]')]: case('offsets_' + nm, pack(T(off=o), d16 + d16[:4] if nm == 'hole_front' else d16))
case('missing_dtype', pack('{"t":{"shape":[2,2],"data_offsets":[0,16]}}', d16)); case('missing_shape', pack('{"t":{"dtype":"I32","data_offsets":[0,16]}}', d16)); case('missing_offsets', pack('{"t":{"dtype":"I32","shape":[2,2]}}', d16))
case('extra_key', pack(T(extra=',"x":{"y":[1,{"z":null}]}'), d16)); case('dtype_twice', pack('{"t":{"dtype":"I32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('entry_is_array', pack('{"t":["I32",[2,2],[0,16]]}', d16), 'CORRUPT')
case('metadata_value_number', pack('{"__metadata__":{"a":1}}')); case('metadata_null', pack('{"__metadata__":null}')); case('metadata_twice', pack('{"__metadata__":{},"__metadata__":{}}')); case('metadata_only', pack('{"__metadata__":{"a":"b"}}')); case('metadata_array', pack('{"__metadata__":[]}'))
case('name_empty', pack('{"":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16), 'CORRUPT'); case('name_escapes', pack('{"a\\u00e9\\n\\"\\\\\\/\\ud83d\\ude00":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('name_lone_surrogate', pack('{"a\\ud83d":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('name_nul', pack('{"a\\u0000b":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16), 'CORRUPT'); case('name_raw_newline', pack('{"a\nb":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('name_raw_tab', pack('{"a\tb":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('name_utf8', pack('{"gewicht\u00e4":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('name_5000', pack('{"%s":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}' % ('n' * 5000), d16), 'CORRUPT')
case('name_bad_escape', pack('{"a\\x":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16)); case('name_slashes', pack('{"../../etc/x":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', d16))
two = lambda a, b, A='a', B='b': '{"%s":{"dtype":"I32","shape":[2,2],"data_offsets":%s},"%s":{"dtype":"I32","shape":[2,2],"data_offsets":%s}}' % (A, a, B, b)
case('two', pack(two('[0,16]', '[16,32]'), d16 * 2)); case('two_out_of_order', pack(two('[16,32]', '[0,16]'), d16 * 2)); case('two_shared', pack(two('[0,16]', '[0,16]'), d16)); case('two_overlap', pack(two('[0,16]', '[8,24]'), d16 * 2)); case('two_hole', pack(two('[0,16]', '[20,36]'), d16 * 3)); case('two_same_name', pack(two('[0,16]', '[16,32]', 't', 't'), d16 * 2)); case('same_name_same_range', pack(two('[0,16]', '[0,16]', 't', 't'), d16), 'CORRUPT')
case('trailing_byte', pack(T(), d16 + b'x')); case('one_missing', pack(T(), d16[:15])); case('two_missing', pack(T(), d16[:14])); case('no_data', pack(T()))
case('odd_alignment', pack('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}', d16[:5]))
case('deep_extra', pack(T(extra=',"x":' + '[' * 100 + ']' * 100), d16), None); case('deep_extra_200', pack(T(extra=',"x":' + '[' * 200 + ']' * 200), d16), None, 'too deep: 128 levels are allowed')
case('zero_tensor_in_the_middle', pack('{"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},"z":{"dtype":"F32","shape":[0,3],"data_offsets":[4,4]},"b":{"dtype":"I32","shape":[1],"data_offsets":[4,8]}}', d16[:8]))
out.close()
