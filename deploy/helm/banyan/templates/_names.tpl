{{- define "banyan.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{/* Arguments from `flags`. A switch that is off is left out; the `off` of a share is false in YAML. */}}
{{- define "banyan.arguments" -}}
{{- range $key, $value := .flags }}
{{- if eq (toString $value) "true" }}
- {{ print $.prefix $key | quote }}
{{- else if or (ne (toString $value) "false") (eq $key "share") }}
- {{ printf "%s%s=%s" $.prefix $key (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
{{- end }}
{{- end -}}
