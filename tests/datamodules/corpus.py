"""A corpus of small files: what stands in each, and what must be read from it, written by hand.

A row is a file. Cells are separated by commas; an arrow stands before what must be read. "!" stands
before words of the refusal. Expected values are never those that the code has given.
"""

# A CSV column of client ids, a row for each -> the clients in their order.
CLIENTS = """
7,12,3                    -> 3,7,12
12,7,12,3                 -> 3,7,12
0,10,9                    -> 0,9,10
-1,0,-10                  -> -10,-1,0
007,7,07,12               -> 007,07,12,7
02134,2134,90210          -> 02134,2134,90210
00,0                      -> 0,00
01,1                      -> 01,1
1e2,100,100.0,3           -> 100,100.0,1e2,3
1.0,1                     -> 1,1.0
1.5,1.50                  -> 1.5,1.50
+1,1                      -> +1,1
1_0,10                    -> 10,1_0
٣,3,３,4                  -> 3,4,٣,３
0x10,16                   -> 0x10,16
inf,1                     -> 1,inf
9223372036854775807,9223372036854775806 -> 9223372036854775806,9223372036854775807
9223372036854775808,9223372036854775807 -> 9223372036854775807,9223372036854775808
18446744073709551616,5    -> 18446744073709551616,5
north,south               -> north,south
south,north               -> north,south
North,north               -> North,north
Zürich,Zug                -> Zug,Zürich
é,e                       -> e,é
St. Mary,St Mary          -> St Mary,St. Mary
a b,ab                    -> a b,ab
true,false                -> false,true
True,true                 -> True,true
yes,no                    -> no,yes
2024-01-31,2023-12-01     -> 2023-12-01,2024-01-31
31/01/2024,01/12/2023     -> 01/12/2023,31/01/2024
1-2,1-10                  -> 1-10,1-2
A1,A01                    -> A01,A1
10A,9                     -> 10A,9
-,x                       -> -,x
.,x                       -> .,x
#1,#2                     -> #1,#2
@home,home                -> @home,home
=1,1                      -> 1,=1
'7,7                      -> '7,7
7%,7                      -> 7,7%
1/2,0.5                   -> 0.5,1/2
a/b,a                     -> a,a/b
a\\b,a                    -> a,a\\b
client_0,client_10,client_9 -> client_0,client_10,client_9
日本,中国                 -> 中国,日本
😀,a                      -> a,😀
NO,SE,DK                  -> DK,NO,SE
None,x                    -> None,x
NA,x                      -> NA,x
null,x                    -> null,x
nan,x                     -> nan,x
NA,7                      -> !has no value in 1 of 2 rows
nan,7                     -> !has no value in 1 of 2 rows
,7                        -> !has no value in 1 of 2 rows
,north                    -> !has no value in 1 of 2 rows
 ,north                   -> !has no value in 1 of 2 rows
"""

# A CSV column of targets -> the names of the classes, and in brackets the number of each row.
CLASSES = """
0,1,1,0                   -> 0,1 (0,1,1,0)
1,2,2                     -> 1,2 (0,1,1)
7,-2,7,30                 -> -2,7,30 (1,0,1,2)
10,9,100                  -> 9,10,100 (1,0,2)
01,1,10                   -> 01,1,10 (0,1,2)
007,7                     -> 007,7 (0,1)
+1,1                      -> +1,1 (0,1)
1_0,10                    -> 10,1_0 (1,0)
yes,no,no                 -> no,yes (1,0,0)
true,false                -> False,True (1,0)
TRUE,FALSE,TRUE           -> False,True (1,0,1)
true,false,maybe          -> false,maybe,true (2,0,1)
well,ill                  -> ill,well (1,0)
Well,well                 -> Well,well (0,1)
A,B,AB,O                  -> A,AB,B,O (0,2,1,3)
NA,NO                     -> NA,NO (0,1)
None,Some                 -> None,Some (0,1)
2024-01-31,2023-01-31     -> 2023-01-31,2024-01-31 (1,0)
<5,5-10,>10               -> 5-10,<5,>10 (1,0,2)
50K,<=50K                 -> 50K,<=50K (0,1)
é,e                       -> e,é (1,0)
日,本                     -> 日,本 (0,1)
9223372036854775807,0     -> 0,9223372036854775807 (1,0)
5,5                       -> 5 (0,0)
x,x                       -> x (0,0)
,1                        -> !has no value in 1 of 2 rows
NA,1                      -> !has no value in 1 of 2 rows
nan,1                     -> !has no value in 1 of 2 rows
null,1,1                  -> !has no value in 1 of 3 rows
,yes                      -> !has no value in 1 of 2 rows
"""

# A CSV column of targets with `target_kind: classes`, likewise.
DECLARED_CLASSES = """
0.0,1.0,1.0               -> 0,1 (0,1,1)
2.0,10.0                  -> 2,10 (0,1)
1,2.0                     -> 1,2 (0,1)
1.,2.0                    -> 1,2 (0,1)
-1.0,1.0                  -> -1,1 (0,1)
0.5,1.5                   -> 0.5,1.5 (0,1)
0.5,1                     -> 0.5,1 (0,1)
01.0,1.0                  -> 01.0,1.0 (0,1)
1e1,10                    -> 10,1e1 (1,0)
yes,no                    -> no,yes (1,0)
true,false                -> False,True (1,0)
"""

# A CSV column of targets -> the values of a regression; with `target_kind: numbers` after "=".
VALUES = """
0.5,2.0                   -> 0.5,2
0.0,1.0                   -> 0,1
1,2.5                     -> 1,2.5
1.0,2                     -> 1,2
1e2,3                     -> 100,3
-1.5,.5                   -> -1.5,0.5
1.,2                      -> 1,2
1E-3,0.25                 -> 0.001,0.25
 1.5,2.5                  -> 1.5,2.5
=1,2                      -> 1,2
=0,1,1                    -> 0,1,1
=007,7                    -> 7,7
=-3,4                     -> -3,4
=true,false               -> 1,0
=16777217,0               -> 16777216,0
=yes,no                   -> !holds 'yes'; it must hold numbers
=1,x                      -> !holds 'x'; it must hold numbers
=1,1_0                    -> !holds '1_0'; it must hold numbers
=1,2;5                    -> !holds '2;5'; it must hold numbers
=1,                       -> !has no value in 1 of 2 rows
0.5,                      -> !has no value in 1 of 2 rows
0.5,nan                   -> !has no value in 1 of 2 rows
0.5,inf                   -> !NaN or infinite values
0.5,1e300                 -> !NaN or infinite values
"""

# A CSV column of an input -> its values.
INPUTS = """
1,2,3                     -> 1,2,3
-1,+2,03                  -> -1,2,3
1.5,2,-3                  -> 1.5,2,-3
1e3,1E-2                  -> 1000,0.01
.5,5.                     -> 0.5,5
 1,2                      -> 1,2
true,false                -> 1,0
TRUE,False                -> 1,0
16777216,1                -> 16777216,1
16777217,1                -> 16777216,1
0.1,1                     -> 0.1,1
-0,0                      -> 0,0
1e-50,1                   -> 0,1
x,1                       -> !holds 'x'; it must hold numbers
yes,no                    -> !holds 'yes'; it must hold numbers
1_0,2                     -> !holds '1_0'; it must hold numbers
1,2 kg                    -> !holds '2 kg'; it must hold numbers
1,<5                      -> !holds '<5'; it must hold numbers
12:30,13:00               -> !holds '12:30'; it must hold numbers
2024-01-31,2024-02-01     -> !holds '2024-01-31'; it must hold numbers
0x10,1                    -> !holds '0x10'; it must hold numbers
true,2                    -> !holds 'true'; it must hold numbers
1,?                       -> !holds '?'; it must hold numbers
1,-                       -> !holds '-'; it must hold numbers
1,                        -> !has no value in 1 of 2 rows
1,NA                      -> !has no value in 1 of 2 rows
1,N/A                     -> !has no value in 1 of 2 rows
1,null                    -> !has no value in 1 of 2 rows
1,NULL                    -> !has no value in 1 of 2 rows
1,nan                     -> !has no value in 1 of 2 rows
1,#N/A                    -> !has no value in 1 of 2 rows
true,                     -> !has no value in 1 of 2 rows
,                         -> !has no value in 2 of 2 rows
inf,1                     -> !NaN or infinite values
1e39,1                    -> !NaN or infinite values
"""

# An input with gaps of clients a, a, a, b -> its values with `missing: mean`.
MEANS = """
1,,3,9                    -> 1,2,3,9
,,3,9                     -> 3,3,3,9
1,NA,4,9                  -> 1,2.5,4,9
0,,1,9                    -> 0,0.5,1,9
-1.5,null,0.5,9           -> -1.5,-0.5,0.5,9
true,,false,true          -> 1,0.5,0,1
1,2,3,4                   -> 1,2,3,4
1,2,3,                    -> !the client 'b' has no value of the column 'x' in its 1 training
,,,4                      -> !the client 'a' has no value of the column 'x' in its 3 training
1,2,x,                    -> !holds 'x'; it must hold numbers
"""

# An input with gaps of clients a, a, a, b -> its values with `missing: drop`.
DROPPED = """
1,,3,9                    -> 1,3,9
,,3,9                     -> 3,9
1,NA,3,                   -> 1,3
1,2,3,4                   -> 1,2,3,4
true,,false,true          -> 1,0,1
1.5,nan,n/a,2             -> 1.5,2
,,,                       -> !as each row of a file lacks a value
1,,x,2                    -> !holds 'x'; it must hold numbers
"""

# A category -> its levels, and in brackets the code of each row.
LEVELS = """
A,B,A                     -> A,B (0,1,0)
B,A                       -> A,B (1,0)
red,green,blue            -> blue,green,red (2,1,0)
NA,NO                     -> NA,NO (0,1)
Ja,ja                     -> Ja,ja (0,1)
7 mm,10 mm                -> 10 mm,7 mm (1,0)
<5,>5                     -> <5,>5 (0,1)
é,z                       -> z,é (1,0)
2024-01,2023-12           -> 2023-12,2024-01 (1,0)
1,x                       -> 1,x (0,1)
01,x                      -> 01,x (0,1)
A=B,A                     -> A,A=B (1,0)
A,                        -> !has no value in 1 of 2 rows
"""

# Whole files -> the inputs, row after row, or words of a refusal; the target is y.
FILES = {
    "with a byte order mark": (b"\xef\xbb\xbfx,y\n1,0\n2,1\n", [[1], [2]]),
    "with lines of Windows": (b"x,y\r\n1,0\r\n2,1\r\n", [[1], [2]]),
    "with lines of an old Mac": (b"x,y\r1,0\r2,1\r", [[1], [2]]),
    "without a last line break": (b"x,y\n1,0\n2,1", [[1], [2]]),
    "with empty lines": (b"x,y\n\n1,0\n\n2,1\n\n", [[1], [2]]),
    "with quotes": (b'"x","y"\n"1","0"\n"2","1"\n', [[1], [2]]),
    "with a comma in a name": (b'"a,b",y\n1,0\n2,1\n', [[1], [2]]),
    "with a quoted line break": (b'x,y\n1,"a\nb"\n2,c\n', [[1], [2]]),
    "with spaces in a name": (b"heart rate,y\n1,0\n2,1\n", [[1], [2]]),
    "with the target first": (b"y,x\n0,1\n1,2\n", [[1], [2]]),
    "with two inputs": (b"x,z,y\n1,3,0\n2,4,1\n", [[1, 3], [2, 4]]),
    "with one row": (b"x,y\n1,0\n", [[1]]),
    "with equal rows": (b"x,y\n1,0\n1,0\n", [[1], [1]]),
    "with names in another script": ("größe,y\n1,0\n2,1\n".encode(), [[1], [2]]),
    "with nothing": (b"", "a file with at least one row"),
    "with names only": (b"x,y\n", "a file with at least one row"),
    "with a short row": (b"x,y\n1,0\n2\n", "row 2 after the names has 1 cells instead of 2"),
    "with a long row": (b"x,y\n1,0\n2,1,3\n", "row 2 after the names has 3 cells instead of 2"),
    "with semicolons": (b"x;y\n1;0\n", "has semicolons between its cells"),
    "with tabs": (b"x\ty\n1\t0\n2\t1\n", "has tabs between its cells; they must be commas"),
    "with spaces": (b"x y\n1 0\n2 1\n", "has spaces between its cells; they must be commas"),
    "with a column twice": (b"x,x,y\n1,2,0\n", "has two columns 'x'"),
    "with an index of pandas": (b",x,y\n0,1,0\n", "has a column without a name"),
    "in UTF-16": ("x,y\n1,0\n".encode("utf-16"), "a CSV file must be saved as UTF-8"),
    "in Latin-1": ("größe,y\n1,0\n".encode("latin-1"), "a CSV file must be saved as UTF-8"),
    "with a cell in Latin-1": ("x,y\n1,ü\n".encode("latin-1"), "must be saved as UTF-8"),
    "with a NUL": (b"x,y\n1,0\n\x00,1\n", "holds the character NUL"),
    "with an open quote": (b'x,y\n1,"0\n', "cannot be read"),
    "without the target": (b"x,z\n1,0\n", "'y'; it must be one of the columns, which are x, z"),
    "with the target only": (b"y\n0\n1\n", "at least one column"),
}

# Parquet columns: type of Arrow and values of an input -> its values as float32, or a refusal.
PARQUET_INPUTS = [
    ("int8", [-128, 127], [-128, 127]),
    ("int16", [-32768, 32767], [-32768, 32767]),
    ("int32", [1, -(2**24)], [1, -(2**24)]),
    ("int64", [2**53, 1], [2**53, 1]),
    ("uint8", [0, 255], [0, 255]),
    ("uint16", [0, 65535], [0, 65535]),
    ("uint32", [0, 2**31], [0, 2**31]),
    ("uint64", [0, 2**40], [0, 2**40]),
    ("float16", [0.5, -2.0], [0.5, -2]),
    ("float32", [0.25, 1e30], [0.25, 1e30]),
    ("float64", [0.25, -3.0], [0.25, -3]),
    ("bool", [True, False], [1, 0]),
    ("decimal128(5, 2)", ["1.50", "-2.25"], [1.5, -2.25]),
    ("int32", [1, None], "has no value in 1 of 2 rows"),
    ("float64", [1.0, float("nan")], "has no value in 1 of 2 rows"),
    ("float64", [1.0, float("inf")], "NaN or infinite values"),
    ("float64", [1.0, 1e39], "NaN or infinite values"),
    ("bool", [True, None], "has no value in 1 of 2 rows"),
    ("string", ["a", "b"], "holds 'a'; it must hold numbers"),
    ("string", ["1", "2"], "holds '1'; it must hold numbers"),
    ("date32", [0, 1], "it must hold numbers"),
    ("timestamp[s]", [0, 1], "it must hold numbers"),
    ("null", [None, None], "has no value in 2 of 2 rows"),
]

# Parquet columns: type and values of the ids -> the clients in their order.
PARQUET_CLIENTS = [
    ("int64", [10, 9], ["9", "10"]),
    ("int64", [-1, 0], ["-1", "0"]),
    ("uint8", [200, 3], ["3", "200"]),
    ("string", ["007", "7"], ["007", "7"]),
    ("string", ["10", "9"], ["10", "9"]),
    ("string", ["b", "a"], ["a", "b"]),
    ("large_string", ["b", "a"], ["a", "b"]),
    ("string", ["NA", "x"], ["NA", "x"]),
    ("string", ["é", "z"], ["z", "é"]),
    ("bool", [True, False], ["False", "True"]),
    ("string", ["a", None], "has no value in 1 of 2 rows"),
    ("int64", [1, None], "has no value in 1 of 2 rows"),
    ("string", ["a", ""], "has no value in 1 of 2 rows"),
]

# Parquet columns: type and values of the target -> the classes and their numbers, or the values.
PARQUET_TARGETS = [
    ("int64", [10, 9], ["9", "10"], [1, 0]),
    ("int8", [0, 1], ["0", "1"], [0, 1]),
    ("uint8", [255, 0], ["0", "255"], [1, 0]),
    ("bool", [True, False], ["False", "True"], [1, 0]),
    ("string", ["10", "9"], ["10", "9"], [0, 1]),
    ("string", ["well", "ill"], ["ill", "well"], [1, 0]),
    ("float64", [0.5, 2.0], None, [0.5, 2]),
    ("float32", [0.0, 1.0], None, [0, 1]),
    ("float16", [0.5, 1.0], None, [0.5, 1]),
    ("string", ["a", None], "has no value in 1 of 2 rows", None),
    ("float64", [0.5, None], "has no value in 1 of 2 rows", None),
    ("float64", [0.5, float("inf")], "NaN or infinite values", None),
]

# Arrays of an .npz file: inputs, targets and ids, each as type and values -> the inputs of a batch,
# the targets and the clients, or a refusal.
ARRAYS = [
    ("f4", [[0.5], [1]], "i8", [0, 1], None, [[0.5], [1]], [0, 1], None),
    ("f8", [[0.5], [1]], "i4", [1, 0], None, [[0.5], [1]], [1, 0], None),
    (">f4", [[0.5], [1]], "i8", [0, 1], None, [[0.5], [1]], [0, 1], None),
    ("f4", [[0.5], [1]], ">i2", [0, 1], None, [[0.5], [1]], [0, 1], None),
    ("u1", [[0], [255]], "i8", [0, 1], None, [[0], [255]], [0, 1], None),
    ("u1", [[[0, 255]], [[51, 51]]], "i8", [0, 1], None, [[[0, 1]], [[0.2, 0.2]]], [0, 1], None),
    ("u2", [[0], [65535]], "i8", [0, 1], None, [[0], [65535]], [0, 1], None),
    ("i8", [[-1], [7]], "u1", [0, 1], None, [[-1], [7]], [0, 1], None),
    ("f4", [[1], [2]], "f8", [0.5, 2], None, [[1], [2]], [0.5, 2], None),
    ("f4", [[1], [2]], "?", [True, False], None, [[1], [2]], [1, 0], None),
    ("f4", [[1], [2]], "i8", [0, 1], ["10", "9"], [[1], [2]], [0, 1], ["10", "9"]),
    ("f4", [[1], [2]], "i8", [0, 1], [10, 9], [[1], [2]], [0, 1], ["9", "10"]),
    ("f4", [[1], [2]], "i8", [0, 1], ["007", "7"], [[1], [2]], [0, 1], ["007", "7"]),
    ("f4", [[1], ["nan"]], "i8", [0, 1], None, "NaN or infinite values", None, None),
    ("f4", [[1], ["inf"]], "i8", [0, 1], None, "NaN or infinite values", None, None),
    ("f8", [[1], [1e39]], "i8", [0, 1], None, "NaN or infinite values", None, None),
    ("f4", [[1], [2]], "f4", [0, "nan"], None, "NaN or infinite values", None, None),
    ("f4", [[1], [2]], "i8", [0, -1], None, "it must be at least 0", None, None),
    ("f4", [[1], [2]], "i8", [0], None, "one target per input", None, None),
    ("f4", [[1], [2]], "U1", ["a", "b"], None, "a type of numbers", None, None),
    ("c8", [[1], [2]], "i8", [0, 1], None, "a type of numbers", None, None),
    ("O", [[1], [2]], "i8", [0, 1], None, 'np.array(inputs, "float32")', None, None),
    ("f4", [[1], [2]], "O", [0, 1], None, 'np.array(targets, "float32")', None, None),
    ("f4", [], "i8", [], None, "N > 0 samples", None, None),
]

# Folders: paths of images and gray levels -> the classes and the clients by image, in their order.
FOLDERS = [
    ("class", {"a/1.png": 0, "b/1.png": 51}, ["a", "b"], None),
    ("class", {"b/1.png": 0, "a/1.jpg": 51}, ["a", "b"], None),
    ("class", {"10/1.png": 0, "9/1.png": 51}, ["10", "9"], None),
    ("class", {"01/1.png": 0, "1/1.png": 51}, ["01", "1"], None),
    ("class", {"a/1.PNG": 0, "a/2.bmp": 51}, ["a", "a"], None),
    ("client/class", {"s/a/1.png": 0, "n/a/1.png": 51}, ["a", "a"], ["n", "s"]),
    ("client/class", {"07/a/1.png": 0, "7/b/1.png": 51}, ["a", "b"], ["07", "7"]),
    ("class/client", {"a/s/1.png": 0, "b/n/1.png": 51}, ["a", "b"], ["s", "n"]),
    ("class", {"a/x/1.png": 0}, "all images must lie at <class>/<image>", None),
    ("class", {"1.png": 0}, "all images must lie at <class>/<image>", None),
    ("client/class", {"a/1.png": 0}, "all images must lie at <client>/<class>/<image>", None),
    ("class", {"a/1.txt": 0}, "holds no images", None),
    ("class", {"a/1.png": None}, "cannot be read as an image", None),
    ("split/class", {"val/a/1.png": 0}, "it must be train or test", None),
    ("split/class", {"test/a/1.png": 0}, "holds test images only", None),
]

# Samples of an .npz file of clients a, a, a, b with gaps, and the rule -> the inputs, the clients
# of the samples that are left, and what is said, or a refusal.
NAN = float("nan")
ARRAY_GAPS = [
    (
        "mean",
        [[1, NAN], [3, 4], [5, 6], [7, 8]],
        [[1, 5], [3, 4], [5, 6], [7, 8]],
        "aaab",
        "1 missing",
    ),
    ("mean", [[NAN], [3], [4], [7]], [[3.5], [3], [4], [7]], "aaab", "1 missing values of '0'"),
    ("mean", [[1], [3], [4], [7]], [[1], [3], [4], [7]], "aaab", ""),
    ("mean", [[1], [3], [4], [NAN]], "the client 'b' has no value of the column '0'", None, None),
    ("mean", [[[NAN]], [[3]], [[4]], [[7]]], "as only inputs of a table", None, None),
    ("drop", [[1, NAN], [3, 4], [5, 6], [7, 8]], [[3, 4], [5, 6], [7, 8]], "aab", "1 of 4 samples"),
    ("drop", [[[NAN]], [[3]], [[4]], [[NAN]]], [[[3]], [[4]]], "aa", "2 of 4 samples"),
    ("drop", [[1], [3], [4], [7]], [[1], [3], [4], [7]], "aaab", ""),
    ("drop", [[NAN], [NAN], [NAN], [NAN]], "as each training sample lacks a value", None, None),
    ("refuse", [[1], [NAN], [4], [7]], "first in sample 1 (of the client 'a')", None, None),
]

# Images of one colour: how many bits a channel has, the values of its channels, and what `colour`
# is -> the channels in [0, 1], and what is said.
PICTURES = [
    (8, [51], "gray", [0.2], "values of 8 bits are divided by 255"),
    (8, [51], "rgb", [0.2, 0.2, 0.2], "gray is repeated in three channels"),
    (8, [51, 102, 255], "rgb", [0.2, 0.4, 1], "values of 8 bits are divided by 255"),
    (8, [51, 51, 51], "gray", [0.2], "gray is 0.299 red + 0.587 green + 0.114 blue"),
    (8, [51, 102, 255, 0], "rgb", [0.2, 0.4, 1], "transparency is left out"),
    (8, [51, 102, 255, 51], "stored", [0.2, 0.4, 1, 0.2], "values of 8 bits are divided by 255"),
    (16, [13107], "gray", [0.2], "gray values of 16 bits are divided by 65,535"),
    (16, [1], "gray", [1 / 65535], "gray values of 16 bits are divided by 65,535"),
    (16, [13107], "rgb", [0.2, 0.2, 0.2], "gray is repeated in three channels"),
    (16, [0, 25855, 65535], "rgb", [0, 100 / 255, 1], "16 bits a channel are cut to the upper 8"),
    (
        16,
        [0, 25600, 65535],
        "stored",
        [0, 100 / 255, 1],
        "16 bits a channel are cut to the upper 8",
    ),
    (
        16,
        [0, 25600, 65535, 0],
        "rgb",
        [0, 100 / 255, 1],
        "16 bits a channel are cut to the upper 8",
    ),
]

# Samples of FEMNIST in LEAF's format: gray values and classes of each writer's training and test
# samples -> the writers in their order, or a refusal.
LEAF = [
    ({"f2": ([7], [1], [8], [2]), "f1": ([0], [61], [255], [0])}, ["f1", "f2"]),
    ({"f10": ([7], [1], [8], [2]), "f9": ([0], [3], [1], [0])}, ["f10", "f9"]),
    ({"007": ([7], [1], [8], [2]), "7": ([0], [3], [1], [0])}, ["007", "7"]),
    ({"é": ([7], [1], [8], [2]), "z": ([0, 1], [3, 4], [1], [0])}, ["z", "é"]),
    ({"a": ([1, 2, 3], [0, 1, 2], [4], [5])}, ["a"]),
    ({"a": ([1], [-1], [4], [5])}, "-1"),
    ({"a": ([1, 2], [0], [4], [5])}, "a has 2 inputs and 1 targets"),
]

# Columns of a data set of Hugging Face in a folder: ids, classes and inputs -> the clients in their
# order, the names of the classes, and the number of each row's class, or a refusal.
HUGGING_FACE = [
    (["b", "a"], ["yes", "no"], [[0.5], [1.0]], ["a", "b"], ["no", "yes"], [1, 0]),
    (["007", "7"], ["b", "a"], [[0.5], [1.0]], ["007", "7"], ["a", "b"], [1, 0]),
    (["10", "9"], ["10", "9"], [[0.5], [1.0]], ["10", "9"], ["10", "9"], [0, 1]),
    ([10, 9], [0, 1], [[0.5], [1.0]], ["9", "10"], None, [0, 1]),
    (["é", "z"], [True, False], [[0.5], [1.0]], ["z", "é"], None, [1, 0]),
    (["a", "b"], [0.5, 2.5], [[1, 2], [3, 4]], ["a", "b"], None, [0.5, 2.5]),
    (["a", None], [0, 1], [[0.5], [1.0]], "'client'", None, None),
    (["a", "b"], ["x", None], [[0.5], [1.0]], "'target'", None, None),
    (["a", "b"], [0, 1], [[0.5], [1.0, 2.0]], "'input'", None, None),
    (["a", "b"], [0, 1], [[0.5], [NAN]], "'input' has rows without a value", None, None),
]
